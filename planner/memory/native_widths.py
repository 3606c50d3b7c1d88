"""In how many bytes an element lies where, under engine native: what is computed with, kept, and reduced.

Source: runtime/sharding/precision.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dsplan.schemas.optimizer import OptimizerSpec, on_shards
from dsplan.schemas.plan import Plan
from dsplan.schemas.units import PRECISION_BYTES

FP32 = 4


@dataclass(frozen=True, slots=True)
class Widths:
    """Bytes of an element. master: also of its reduced gradient and of each optimizer state."""

    compute: int
    master: int
    reduce: int


def widths(plan: Plan) -> Widths:
    """bf16 masters, communication_data_type, and what stages 0 and 1 add up in (grad_accum_dtype)."""
    compute, knobs = PRECISION_BYTES[plan.precision], plan.knobs
    reduce = compute
    if knobs.communication_dtype is not None:
        reduce = PRECISION_BYTES[knobs.communication_dtype]
    elif plan.zero_stage < 2 and knobs.grad_accum_dtype == "fp32":
        reduce = FP32
    return Widths(compute=compute, master=2 if bf16_masters(plan) else FP32, reduce=reduce)


def bf16_masters(plan: Plan) -> bool:
    """bf16_master_weights_and_grads, which the engine takes with bf16_optimizer_states alone."""
    return plan.precision == "bf16" and plan.knobs.low_precision_masters


def native_optimizer(plan: Plan) -> OptimizerSpec:
    """The optimizer as it steps over this plan's shards."""
    spec = on_shards(plan.optimizer)
    return replace(spec, state_dtype="bf16") if bf16_masters(plan) and spec.state_dtype == "fp32" else spec
