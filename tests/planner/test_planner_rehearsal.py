"""Rehearsal: what it leaves behind, and what it refuses."""

from dataclasses import replace

import pytest
import torch.distributed as dist
from dsplan.planner.rehearsing.native import rehearsal, rehearse
from dsplan.schemas.choices import OptimizerSpec
from dsplan.schemas.layout import Layout
from dsplan.schemas.ledger import STEP_PHASES
from dsplan.schemas.plan import Plan
from dsplan.schemas.problem import Problem
from models import Residual, residual

PLAN = Plan(engine="native", layout=Layout(dp_shard=2), zero_stage=3, precision="fp32", micro_batch=8, accumulation=1)
PARAMS = Residual.root_params + 3 * Residual.block_params


def test_states_are_counted_to_the_byte():
    """Every first dim is even: half of each tensor, 12 bytes an element, and a step counter per tensor."""
    book = rehearse(residual(), PLAN)
    assert book.level == "rehearsal" and book.engine == "native"
    assert {moment.phase for moment in book.moments} == set(STEP_PHASES)
    assert book.resident_bytes == 12 * PARAMS // 2 + 4 * (4 + 3 * 4)


def test_it_leaves_neither_a_process_group_nor_a_changed_model():
    subject = residual()
    kind, names = type(subject.module), [name for name, _ in subject.module.named_parameters()]
    first = rehearse(subject, PLAN)
    assert not dist.is_initialized()
    assert type(subject.module) is kind
    assert [name for name, _ in subject.module.named_parameters()] == names
    assert all(param.device.type == "meta" for param in subject.module.parameters())
    assert rehearse(subject, PLAN) == first


def test_long_accumulations_are_shortened():
    few = rehearse(residual(), replace(PLAN, accumulation=3))
    many = rehearse(residual(), replace(PLAN, accumulation=50))
    assert many.moments == few.moments
    assert few.collectives and not many.collectives


def test_it_needs_no_more_for_more_ranks():
    eight = rehearse(residual(), replace(PLAN, layout=Layout(dp_shard=4096), zero_stage=2))
    assert eight.resident_bytes < rehearse(residual(), replace(PLAN, zero_stage=2)).resident_bytes


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"engine": "deepspeed"}, "engine deepspeed"),
        ({"layout": Layout(dp_shard=2, tp=2)}, "tp 2"),
        ({"layout": Layout(dp_shard=2, pp=3)}, "pp 3"),
    ],
)
def test_what_no_rehearsal_covers_is_said(change, named):
    with pytest.raises(Problem, match=f"{named} is not available yet; the formula stands"):
        rehearse(residual(), replace(PLAN, **change))
    assert not dist.is_initialized()


def test_an_optimizer_that_the_engine_lacks_is_said():
    with pytest.raises(Problem, match="optimizer adamw-8bit is not available: torch has none; the formula stands"):
        rehearse(residual(), replace(PLAN, optimizer=OptimizerSpec(name="adamw", state_dtype="8bit")))


@pytest.mark.parametrize(("name", "bytes_each"), [("lion", 8), ("lamb", 12)])
def test_the_engines_own_optimizers_are_rehearsed(name, bytes_each):
    """Masters and states, half of each tensor, and no counter."""
    book = rehearse(residual(), replace(PLAN, optimizer=OptimizerSpec(name=name)))
    assert book.resident_bytes == bytes_each * PARAMS // 2


def test_muon_is_rehearsed():
    """One state of matrices, two of the rest."""
    lion, lamb, muon = (
        rehearse(residual(), replace(PLAN, optimizer=OptimizerSpec(name=name))).resident_bytes
        for name in ("lion", "lamb", "muon")
    )
    assert lion < muon < lamb


def test_events_add_up_to_the_peak():
    """The live bytes that the events add up to: those of the ledger, at the start and at the peak."""
    told = rehearsal(residual(), PLAN)
    live = peak = sum(delta for _, delta in told.events[: told.resident])
    for _, delta in told.events[told.resident :]:
        live += delta
        peak = max(peak, live)
    assert peak == told.ledger.allocated_bytes
    assert live - told.ledger.resident_bytes < 4096  # the loop's batch and loss
