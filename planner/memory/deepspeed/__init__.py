"""What DeepSpeed 0.19.8 allocates, and when: flat buffers, buckets and gathered parameters, laid over the trace."""

from __future__ import annotations

from dsplan.planner.memory.deepspeed.gathered import Gathered
from dsplan.planner.memory.deepspeed.partitioned import Partitioned
from dsplan.planner.memory.deepspeed.plain import Accumulated, Plain
from dsplan.planner.memory.deepspeed.rank import Rank
from dsplan.schemas.ledger import Ledger
from dsplan.schemas.plan import Plan
from dsplan.schemas.trace import Trace


def ledgers(trace: Trace, plan: Plan) -> tuple[Ledger, ...]:
    """One ledger per pipeline stage: of the data-parallel rank 0, which owns the first partition."""
    kind = _kind(plan)
    return tuple(kind(trace, plan, stage).ledger() for stage in range(plan.layout.pp))


def _kind(plan: Plan) -> type[Rank]:
    """Which of DeepSpeed's optimizer wrappers runs. Source: engine.py, _do_optimizer_sanity_check."""
    if plan.zero_stage == 0:
        return Plain
    if plan.zero_stage == 3:
        return Gathered
    summed = plan.knobs.grad_accum_dtype
    if plan.zero_stage == 1 and plan.precision == "bf16" and summed == "fp32" and plan.offload == "none":
        return Accumulated
    return Partitioned
