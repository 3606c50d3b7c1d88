"""Answers of --max and --min as people read them, in words written by hand."""

import pytest
from dsplan.reports.answers_text import answers_text
from dsplan.schemas.answers import Asked, Probe, Reach
from dsplan.schemas.layout import Layout
from dsplan.schemas.plan import Plan
from dsplan.schemas.units import GIB

PLAN = Plan(engine="native", layout=Layout(dp_shard=2), zero_stage=3, precision="bf16", micro_batch=1, accumulation=1)


def probe(value: int, gib: int, verdict: str) -> Probe:
    return Probe(
        value=value,
        fits=verdict != "oom",
        verdict=verdict,
        why="",
        allocated_bytes=gib * GIB,
        device_bytes=gib * GIB,
        device_bytes_low=gib * GIB,
        device_bytes_high=(gib + 1) * GIB,
        host_bytes=0,
        room_bytes=(40 - gib) * GIB,
        global_batch=value,
    )


@pytest.mark.parametrize(
    ("asked", "answer", "beside", "lines"),
    [
        ("min gpus", 2, 1, (": 2 GPUs: 30 GiB of 40 GiB, 10 GiB left", "  on 1 GPU it does not fit: because")),
        ("max micro-batch", 2, 3, (": 2: 30 GiB of 40 GiB, 10 GiB left", "  3 does not fit: because")),
    ],
)
def test_a_number_of_gpus_is_named_as_such(asked: Asked, answer: int, beside: int, lines: tuple[str, str]) -> None:
    reach = Reach(
        asked=asked,
        plan=PLAN,
        answer=probe(answer, 30, "fits"),
        next=probe(beside, 50, "oom"),
        usable_bytes=40 * GIB,
        stopped_by="because",
    )
    first, second = answers_text([reach]).splitlines()
    assert first.endswith(lines[0])
    assert second == lines[1]
