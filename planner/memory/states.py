"""Model states: parameters, gradients and optimizer state of one rank, without buffers and activations."""

from __future__ import annotations

from dsplan.planner.memory.native_widths import native_optimizer, widths
from dsplan.schemas.layout import PARTIAL, REPLICATE, ZERO, Placement
from dsplan.schemas.optimizer import BLOCK_8BIT
from dsplan.schemas.plan import Plan
from dsplan.schemas.trace import Trace
from dsplan.schemas.units import PRECISION_BYTES

FP32 = 4
"""Bytes of an fp32 master parameter, and of one optimizer state of it, in both engines."""


def state_bytes(model: Trace | int, plan: Plan) -> dict[str, int]:
    """{"params", "grads", "optimizer"} on one rank: params and optimizer between steps, grads at the end of backward.

    model: a trace, or a number of parameters, all of them trainable. tp and pp divide evenly here; the ledger says which
    rank is the fullest. Source: Rajbhandari et al. 2020 (arXiv:1910.02054), section 5 and figure 1, for engine deepspeed;
    torch/distributed/fsdp/_fully_shard for native, whose shard is the master, so that its 16-bit copies are no state.
    """
    numel = model if isinstance(model, int) else model.params
    trainable = model if isinstance(model, int) else model.trainable_params
    split = plan.layout.tp * plan.layout.pp
    state, width = ZERO[plan.zero_stage], PRECISION_BYTES[plan.precision]
    optimizer = native_optimizer(plan) if plan.engine == "native" else plan.optimizer
    each = {"fp32": FP32, "bf16": 2, "8bit": 1 + FP32 / BLOCK_8BIT}[optimizer.state_dtype]

    def states(count: int) -> int:
        return round(each * optimizer.states * count)

    def local(count: int, placement: Placement) -> int:
        whole = placement is REPLICATE or placement is PARTIAL
        return -(-count // (split * (1 if whole else plan.layout.dp_shard)))

    if plan.engine == "native":
        shard, own = state.optim, widths(plan).master  # the master's placement: what is gathered from it is no state
        return {
            "params": own * local(numel, shard),
            "grads": own * local(trainable, shard),
            "optimizer": states(local(trainable, shard)),
        }
    master = FP32 if width < FP32 else 0
    return {
        "params": width * local(numel, state.param),
        "grads": width * local(trainable, state.grad),
        "optimizer": master * local(trainable, state.optim) + states(local(trainable, state.optim)),
    }
