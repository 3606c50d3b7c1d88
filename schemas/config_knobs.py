"""ZeroKnobs of a DeepSpeed configuration: what changes bytes in zero_optimization, data_types and the precision blocks.

Source: deepspeed/runtime/zero/{config,offload_config}.py, deepspeed/runtime/{config,precision_config}.py of 0.19.8.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dsplan.schemas.choices import ZeroKnobs

if TYPE_CHECKING:
    from dsplan.schemas.config import _Reader

_SIZES = (
    ("reduce_bucket_size", "reduce_bucket_size", 500_000_000, 1),
    ("allgather_bucket_size", "allgather_bucket_size", 500_000_000, 1),
    ("prefetch_bucket_size", "stage3_prefetch_bucket_size", 50_000_000, 0),
    ("param_persistence_threshold", "stage3_param_persistence_threshold", 100_000, 0),
    ("model_persistence_threshold", "stage3_model_persistence_threshold", sys.maxsize, 0),
    ("max_live_parameters", "stage3_max_live_parameters", 1_000_000_000, 0),
    ("max_reuse_distance", "stage3_max_reuse_distance", 1_000_000_000, 0),
    ("sub_group_size", "sub_group_size", 1_000_000_000, 1),
    ("hpz_partition_size", "zero_hpz_partition_size", 1, 0),
    ("mics_shard_size", "mics_shard_size", -1, -1),
)
_SWITCHES = (
    ("contiguous_gradients", "contiguous_gradients", True),
    ("reduce_scatter", "reduce_scatter", True),
    ("multi_rank_allreduce", "use_multi_rank_bucket_allreduce", True),
    ("round_robin_gradients", "round_robin_gradients", False),
    ("memory_efficient_linear", "memory_efficient_linear", True),
    ("quantized_weights", "zero_quantized_weights", False),
    ("quantized_gradients", "zero_quantized_gradients", False),
    ("gather_16bit_weights_on_save", "stage3_gather_16bit_weights_on_model_save", False),
)
"""(field, key, default) of ZeroKnobs and of the block."""
_DTYPES = {"fp32": "fp32", "float32": "fp32", "fp16": "fp16", "float16": "fp16", "bf16": "bf16", "bfloat16": "bf16"}


def read_knobs(take: _Reader, zero: Mapping[str, Any], precision: Mapping[str, Any]) -> ZeroKnobs:
    """zero: the zero_optimization block. precision: the block of the precision that is on."""
    name = "zero_optimization"
    sizes: dict[str, Any] = {
        field: take.integer(zero, name, key, default, low=low) for field, key, default, low in _SIZES
    }
    switches: dict[str, Any] = {field: take.boolean(zero, name, key, default) for field, key, default in _SWITCHES}
    overlap = zero.get("overlap_comm")
    on = precision.get
    optimizer, params = _block(zero, "offload_optimizer"), _block(zero, "offload_param")
    at = f"{name}/offload_"
    return ZeroKnobs(
        **sizes,
        **switches,
        overlap_comm=None if overlap in (None, "auto") else take.boolean(zero, name, "overlap_comm", False),
        grad_accum_dtype=_dtype(_block(take.raw, "data_types").get("grad_accum_dtype")),
        communication_dtype=_dtype(take.raw.get("communication_data_type")),
        low_precision_masters=on("bf16_master_weights_and_grads") is True
        or on("fp16_master_weights_and_grads") is True,
        low_precision_states=on("bf16_optimizer_states") is True,
        offload_ratio=take.number(optimizer, f"{at}optimizer", "ratio", 1.0, low=0, high=1),
        nvme_optimizer=optimizer.get("device") == "nvme",
        optimizer_buffers=take.integer(optimizer, f"{at}optimizer", "buffer_count", 4, low=0),
        nvme_params=params.get("device") == "nvme",
        param_buffers=take.integer(params, f"{at}param", "buffer_count", 5, low=0),
        param_buffer_size=take.integer(params, f"{at}param", "buffer_size", 100_000_000, low=0),
    )


def _block(within: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = within.get(key)
    return value if isinstance(value, Mapping) else {}


def _dtype(value: object) -> str | None:
    return _DTYPES.get(value.lower()) if isinstance(value, str) else None
