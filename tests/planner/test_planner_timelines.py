"""--timeline: the highest point is the ledger's peak, slices lie in each other, and the file is one that a viewer opens."""

import json
from dataclasses import replace

import pytest
from dsplan.planner.memory import ledger
from dsplan.planner.timelines import timeline, write_timeline
from dsplan.planner.tracing.tracer import trace
from dsplan.schemas.layout import Layout
from dsplan.schemas.ledger import CATEGORIES
from dsplan.schemas.plan import Plan
from dsplan.schemas.problem import Problem
from models import LAYERS, residual

PLAN = Plan(engine="native", layout=Layout(dp_shard=4), zero_stage=1, precision="bf16", micro_batch=4, accumulation=1)


@pytest.fixture(scope="module")
def traced():
    return trace(residual(), precision="bf16", micro_batch=4)


@pytest.mark.parametrize("engine", ["native", "deepspeed"])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_the_highest_point_is_the_peak_of_the_step(engine, zero_stage, traced) -> None:
    plan = replace(PLAN, engine=engine, zero_stage=zero_stage)
    drawn = timeline(traced, plan)
    sums = [sum(event["args"].values()) for event in drawn["traceEvents"] if event["ph"] == "C"]
    book = ledger(traced, plan)
    assert max(sums) == max(book.phase_bytes(phase) for phase in ("forward", "backward", "step"))
    assert sums[-1] == book.phase_bytes("step")


def test_slices_name_phases_and_modules_and_lie_in_each_other(traced) -> None:
    slices = [event for event in timeline(traced, PLAN)["traceEvents"] if event["ph"] == "X"]
    phases = [event["name"] for event in slices if event["tid"] == 1]
    assert phases == ["forward", "backward", "optimizer step"]
    modules = [event for event in slices if event["tid"] == 2]
    assert {f"blocks.{layer}" for layer in range(LAYERS)} <= {event["name"] for event in modules}
    for one in modules:
        for other in modules:
            apart = one["ts"] + one["dur"] <= other["ts"] or other["ts"] + other["dur"] <= one["ts"]
            inside = one["ts"] >= other["ts"] and one["ts"] + one["dur"] <= other["ts"] + other["dur"]
            assert (
                apart or inside or (other["ts"] >= one["ts"] and other["ts"] + other["dur"] <= one["ts"] + one["dur"])
            )


def test_the_file_is_json_with_counters_by_category(traced, tmp_path) -> None:
    file = tmp_path / "out.json"
    write_timeline(traced, PLAN, str(file))
    counters = [event for event in json.loads(file.read_text())["traceEvents"] if event["ph"] == "C"]
    assert all(set(event["args"]) == set(CATEGORIES) and min(event["args"].values()) >= 0 for event in counters)
    assert [event["ts"] for event in counters] == sorted(event["ts"] for event in counters)


def test_a_file_that_cannot_be_written_is_one_line(traced, tmp_path) -> None:
    with pytest.raises(Problem, match=r"--timeline .* cannot be written \(No such file or directory\)"):
        write_timeline(traced, PLAN, str(tmp_path / "none" / "out.json"))
    with pytest.raises(Problem, match="has no sample batch"):
        write_timeline(replace(traced, segments=()), PLAN, str(tmp_path / "out.json"))
