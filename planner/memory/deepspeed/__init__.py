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
    return tuple(rank.ledger(plan.optimizer) for rank in _ranks(trace, plan))


def _ranks(trace: Trace, plan: Plan) -> tuple[Rank, ...]:
    """The stages' ranks, remembered: neither the optimizer nor the numbers of the batch change what else they hold."""
    key = (
        id(trace),
        plan.zero_stage,
        plan.layout,
        min(plan.accumulation, 2 if plan.layout.pp == 1 else plan.accumulation),
        plan.offload,
        plan.knobs,
        plan.built,
        plan.schedule,
        plan.virtual_stages,
        plan.sequence_parallel,
    )
    found = _remembered.get(key)
    if found is None or found[0] is not trace:
        if len(_remembered) > 4096:
            _remembered.clear()
        kind = _kind(plan)
        made = tuple(kind(trace, plan, stage) for stage in range(plan.layout.pp))
        found = _remembered[key] = (trace, made)
    return found[1]


_remembered: dict[tuple[object, ...], tuple[Trace, tuple[Rank, ...]]] = {}


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
