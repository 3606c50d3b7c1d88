"""Bytes of one rank over one optimizer step, from a trace and a plan. One small table of layers per engine."""

from __future__ import annotations

from dsplan.planner.memory.states import state_bytes
from dsplan.schemas.ledger import Ledger
from dsplan.schemas.plan import Plan
from dsplan.schemas.trace import Trace

__all__ = ["ledger", "state_bytes"]


def ledger(trace: Trace, plan: Plan) -> Ledger:
    """The formula's ledger of the fullest rank. The trace must be of the plan's precision, micro_batch and recompute.

    Without segments in the trace (no sample batch) only state bytes and the engine's own buffers are in it.
    """
    from dsplan.planner.memory import deepspeed, native

    return deepspeed.ledger(trace, plan) if plan.engine == "deepspeed" else native.ledger(trace, plan)
