"""The deepspeed formula against what real DeepSpeed held on two ranks (tests/oracle/deepspeed_bytes.py asked it)."""

import json
from functools import cache
from pathlib import Path

import pytest
from dsplan.planner.memory import ledger
from dsplan.planner.models.load import Subject, load_subject
from dsplan.planner.tracing.tracer import trace
from dsplan.schemas.choices import OptimizerSpec, ZeroKnobs
from dsplan.schemas.layout import Layout
from dsplan.schemas.ledger import Ledger
from dsplan.schemas.plan import Plan

ROOT = Path(__file__).parents[2]
TOLD = json.loads((ROOT / "tests/oracle/deepspeed_bytes.json").read_text("utf-8"))
BUCKET = 200_000
EXACT = 0.001


@cache
def subject() -> Subject:
    return load_subject(str(ROOT / "examples/gpt.py"), sets={name: str(value) for name, value in TOLD["sizes"].items()})


def predicted(record: dict[str, object]) -> Ledger:
    knobs = ZeroKnobs(reduce_bucket_size=BUCKET, allgather_bucket_size=BUCKET)
    if record["zero_stage"] == 3:
        knobs = ZeroKnobs(
            reduce_bucket_size=BUCKET,
            allgather_bucket_size=BUCKET,
            prefetch_bucket_size=BUCKET,
            param_persistence_threshold=1000,
        )
    plan = Plan(
        engine="deepspeed",
        layout=Layout(dp_shard=2),
        zero_stage=record["zero_stage"],  # type: ignore[arg-type]
        precision=str(record["precision"]),
        micro_batch=TOLD["micro_batch"],
        accumulation=record["accumulation"],  # type: ignore[arg-type]
        seq_len=TOLD["sizes"]["positions"],
        optimizer=OptimizerSpec(name="adamw", kernel="for-loop"),
        knobs=knobs,
    )
    traced = trace(
        subject(),
        precision=plan.precision,
        recompute="none",
        micro_batch=plan.micro_batch,
        seq_len=plan.seq_len,
        count_flops=False,
    )
    return ledger(traced, plan)


@pytest.mark.parametrize(
    "record", TOLD["records"], ids=lambda r: f"zero{r['zero_stage']}-{r['precision']}-accumulation{r['accumulation']}"
)
def test_bytes_are_deepspeeds(record: dict[str, int]) -> None:
    book = predicted(record)  # type: ignore[arg-type]
    assert book.resident_bytes == pytest.approx(record["resident"], rel=EXACT)
    assert book.phase_bytes("forward") == pytest.approx(record["forward"], rel=EXACT)
    assert book.phase_bytes("step") == pytest.approx(record["step"], rel=EXACT)
    assert book.phase_bytes("backward") == pytest.approx(record["backward"], rel=EXACT)
