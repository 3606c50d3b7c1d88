"""What a plan chooses among: recompute, offload, the optimizer (`optimizer.py`), ZeRO's sizes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

from dsplan.schemas.optimizer import OPTIMIZERS, Kernel, OptimizerSpec, optimizer_named

__all__ = [
    "BUILTS",
    "OFFLOADS",
    "OPTIMIZERS",
    "PIPELINE_SCHEDULES",
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
BUILTS: tuple[Built, ...] = ("host", "meta")
PipelineSchedule = Literal["1f1b", "gpipe", "interleaved"]
PIPELINE_SCHEDULES: tuple[PipelineSchedule, ...] = ("gpipe", "1f1b", "interleaved")


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
    max_reuse_distance: int = 1_000_000_000
    model_persistence_threshold: int = sys.maxsize
    reduce_scatter: bool = True
    multi_rank_allreduce: bool = True
    """use_multi_rank_bucket_allreduce: slices for several ranks go in one flat copy."""
    round_robin_gradients: bool = False
    grad_accum_dtype: str | None = None
    """data_types.grad_accum_dtype: fp32, fp16 or bf16; None: the compute dtype."""
    communication_dtype: str | None = None
    """communication_data_type; None: the compute dtype."""
    low_precision_masters: bool = False
    """{fp16,bf16}_master_weights_and_grads: masters and their gradients in the compute dtype."""
    low_precision_states: bool = False
    """bf16_optimizer_states: so are the states."""
    hpz_partition_size: int = 1
    """zero_hpz_partition_size: a second 16-bit copy, split over so many ranks."""
    mics_shard_size: int = -1
    """Above 0: stage 3 splits over so many ranks, not all (MiCS)."""
    quantized_weights: bool = False
    """Gathers carry one byte an element, and are dequantised."""
    quantized_gradients: bool = False
    offload_ratio: float = 1.0
    """The part of the optimizer's sub-groups that is on the host (stage 3, offload_optimizer.ratio)."""
    nvme_optimizer: bool = False
    """Optimizer states live on nvme; the host holds `optimizer_buffers` buffers of the largest sub-group."""
    optimizer_buffers: int = 4
    nvme_params: bool = False
    """Parameter shards live on nvme; the host holds `param_buffers` buffers of `param_buffer_size` elements."""
    param_buffers: int = 5
    param_buffer_size: int = 100_000_000
    memory_efficient_linear: bool = True
    """False: autograd keeps the gathered weight of each linear layer from forward to backward (stage 3)."""
    gather_16bit_weights_on_save: bool = False
    """The whole model is gathered on rank 0's host to be saved (stage3_gather_16bit_weights_on_model_save)."""
