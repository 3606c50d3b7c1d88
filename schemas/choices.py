"""What a plan chooses among: recompute, offload, the optimizer (`optimizer.py`), ZeRO's sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dsplan.schemas.optimizer import OPTIMIZERS, Kernel, OptimizerSpec, optimizer_named

__all__ = [
    "OFFLOADS",
    "OPTIMIZERS",
    "RECOMPUTES",
    "Built",
    "Kernel",
    "Offload",
    "OptimizerSpec",
    "PipelineSchedule",
    "Recompute",
    "ZeroKnobs",
    "optimizer_named",
]

Recompute = Literal["none", "full", "selective"]
RECOMPUTES: tuple[Recompute, ...] = ("none", "full", "selective")
Offload = Literal["none", "optimizer", "param"]
"""param includes optimizer: parameters and optimizer state both live on the host."""
OFFLOADS: tuple[Offload, ...] = ("none", "optimizer", "param")

Built = Literal["host", "meta"]
"""Where the script makes the model: whole on every rank's host, or nowhere (device meta, zero.Init): shard by shard."""
PipelineSchedule = Literal["1f1b", "gpipe", "interleaved"]


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
    gather_16bit_weights_on_save: bool = False
    """The whole model is gathered on rank 0's host to be saved (stage3_gather_16bit_weights_on_model_save)."""
