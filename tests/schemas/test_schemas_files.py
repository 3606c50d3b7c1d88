"""What is written to disk comes back the same."""

import pytest
from dsplan.schemas.layout import Layout
from dsplan.schemas.ledger import Collective, Ledger, MemoryItem, Moment
from dsplan.schemas.plan import PlanFile
from dsplan.schemas.trace import Param, Point, Segment, Trace, Unit

LEDGER = Ledger(
    engine="native",
    level="formula",
    moments=(
        Moment(phase="forward", where="block 1", items=(MemoryItem(category="params", bytes=3, why="x"),)),
        Moment(
            phase="backward",
            where="block 0",
            items=(MemoryItem(category="params", bytes=3, why="x"), MemoryItem(category="grads", bytes=4, why="y")),
        ),
    ),
    resident_bytes=3,
    collectives=(Collective(kind="all_gather", count=2, payload_bytes=8),),
)


def test_a_ledger_comes_back() -> None:
    assert Ledger.from_json(LEDGER.to_json()) == LEDGER


def test_the_peak_is_the_fullest_moment_and_adds_up() -> None:
    assert LEDGER.peak.phase == "backward"
    assert LEDGER.allocated_bytes == 7
    assert LEDGER.phase_bytes("forward") == 3
    assert LEDGER.phase_bytes("step") == 0


def test_a_trace_comes_back() -> None:
    unit = Unit(name="", params=(Param(name="w", shape=(2, 3), dtype_bytes=4, trainable=False),), forward_flops=1.0)
    segment = Segment(unit=0, phase="forward", start=Point(0, 0, 0), end=Point(5, 1, 0), points=(Point(6, 1, 0),))
    trace = Trace(
        source="m.py",
        units=(unit,),
        buffer_bytes=0,
        precision="fp32",
        recompute="none",
        micro_batch=1,
        seq_len=None,
        segments=(segment,),
        forward_flops=1.0,
        flops_source="fvcore",
        notes=("n",),
    )
    assert Trace.from_json(trace.to_json()) == trace
    assert (trace.params, trace.trainable_params) == (6, 0)


def plan_file() -> PlanFile:
    return PlanFile(
        model={"source": "m.py", "params": 1, "shapes_sha256": "0"},
        cluster={},
        engine="native",
        layout=Layout(dp_shard=2),
        zero_stage=2,
        precision="bf16",
        micro_batch=1,
        accumulation=1,
        recompute="none",
        offload="none",
        ds_config={},
        predicted={},
    )


def test_a_plan_comes_back() -> None:
    assert PlanFile.from_json(plan_file().to_json()) == plan_file()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"version": 2}, "version"),
        ({"zero_stage": "2"}, "zero_stage"),
        ({"layout": {"tp": 0}}, "layout"),
        ({"engine": "x"}, "engine"),
    ],
)
def test_a_plan_of_the_wrong_shape_names_the_key(change: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        PlanFile.from_json({**plan_file().to_json(), **change})
