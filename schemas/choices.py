"""What a plan chooses among: recompute, offload, the optimizer as far as memory knows it, ZeRO's sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Recompute = Literal["none", "full", "selective"]
RECOMPUTES: tuple[Recompute, ...] = ("none", "full", "selective")
Offload = Literal["none", "optimizer", "param"]
"""param includes optimizer: parameters and optimizer state both live on the host."""
OFFLOADS: tuple[Offload, ...] = ("none", "optimizer", "param")

OPTIMIZER_STATES: dict[str, int] = {
    "adam": 2,
    "adamw": 2,
    "adagrad": 1,
    "lion": 1,
    "sgd": 0,
    "lamb": 2,
    "muon": 1,
}
"""fp32 state tensors per parameter, without momentum for sgd. Source: torch.optim; deepspeed/ops for lion and lamb."""

Kernel = Literal["fused", "foreach", "for-loop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """The optimizer as far as memory knows it."""

    name: str = "adamw"
    """Lower case, a key of OPTIMIZER_STATES."""
    momentum: bool = False
    """sgd only: keeps one state per parameter."""
    kernel: Kernel = "fused"
    """How the step runs: fused has no temporaries, foreach has whole-model ones, for-loop one parameter's."""

    @property
    def states(self) -> int:
        return OPTIMIZER_STATES[self.name] + (1 if self.name == "sgd" and self.momentum else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroKnobs:
    """zero_optimization's sizes, in elements, with the defaults of DeepSpeed 0.19.8 (deepspeed/runtime/zero/config.py)."""

    reduce_bucket_size: int = 500_000_000
    allgather_bucket_size: int = 500_000_000
    prefetch_bucket_size: int = 50_000_000
    param_persistence_threshold: int = 100_000
    max_live_parameters: int = 1_000_000_000
    sub_group_size: int = 1_000_000_000
    overlap_comm: bool | None = None
    """None: true at stage 3, false elsewhere."""
    contiguous_gradients: bool = True
