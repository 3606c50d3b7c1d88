"""Bytes of one rank over one optimizer step, from a trace and a plan: one table of layers per engine."""

from __future__ import annotations

from dsplan.planner.memory import deepspeed, native
from dsplan.planner.memory.states import state_bytes
from dsplan.schemas.ledger import Ledger
from dsplan.schemas.plan import Plan
from dsplan.schemas.trace import Trace

__all__ = ["ledger", "ledgers", "state_bytes"]


def ledger(trace: Trace, plan: Plan) -> Ledger:
    """The formula's ledger of the fullest rank.

    The trace must be of the plan's precision, micro_batch and recompute. Without segments in it (no sample batch) the
    ledger has the moments of loading and of the step alone, without activations.
    """
    if plan.engine == "native":
        return native.ledger(trace, plan)
    return max(deepspeed.ledgers(trace, plan), key=lambda book: book.allocated_bytes)


def ledgers(trace: Trace, plan: Plan) -> tuple[Ledger, ...]:
    """One ledger per pipeline stage, in their order."""
    return deepspeed.ledgers(trace, plan) if plan.engine == "deepspeed" else native.ledgers(trace, plan)
