"""What the native engine makes of each key of a DeepSpeed JSON: carried out, without effect, or refused.

The table holds what is not carried out; a key that it does not name is carried out, or unknown (known_keys.py).
Keys and defaults: DeepSpeed 0.19.8.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dsplan.schemas.offloading import reasons as offload_reasons
from dsplan.schemas.precision import precision_reasons

Level = Literal["error", "warning"]
OFF: tuple[Any, ...] = (None, False, "auto", "none", {})
"""Values with which nothing is asked for."""


@dataclass(frozen=True, slots=True)
class Support:
    """refused: an error, since the run would not be what the file says. Else the key has no effect: a warning."""

    refused: bool
    reason: str
    harmless: tuple[Any, ...] = ()
    """Values beside OFF that ask for nothing: DeepSpeed's default, or what the engine does anyway. Where true is one of
    them, false is not, unless it is named too."""


def _refused(reason: str, *harmless: Any) -> Support:
    return Support(True, reason, harmless)


def _no_effect(reason: str, *harmless: Any) -> Support:
    return Support(False, reason, harmless)


FSDP_OWN = "no effect: FSDP2 gathers and reduces block by block, without buckets"
LATER = "is not carried out by the native engine yet; remove it, or use --engine deepspeed"
SAME_MEAN = "no effect: the mean of the gradients is the same whether they are divided before their sum or after it"
SILENT = "no effect: the native engine writes no such report"

KEYS: dict[str, Support] = {
    # the step
    "managed_gradient_accumulation": _refused(LATER, True),
    "prescale_gradients": _no_effect(SAME_MEAN),
    "gradient_predivide_factor": _no_effect(SAME_MEAN, 1),
    "gradient_allreduce_op": _refused("only mean is carried out by the native engine", "mean"),
    "seq_parallel_communication_data_type": _no_effect("no effect: there is no sequence parallelism", "fp32"),
    "sequence_parallel_size": _refused("sequence parallelism " + LATER, 1),
    "vocabulary_size": _no_effect("no effect"),
    "disable_python_gc": _no_effect("no effect: the garbage collector is left alone"),
    "disable_allgather": _no_effect("no effect: nothing in DeepSpeed reads it either"),
    "log_level": _no_effect("no effect: the native engine has one level of log"),
    "data_parallel_size": _no_effect("no effect: dp follows from the number of ranks"),
    "use_data_before_expert_parallelism": _no_effect("no effect: there is no expert parallelism"),
    "allgather_size": _no_effect(FSDP_OWN, 500_000_000),
    # fp16, bf16, types
    "fp16.fp16_master_weights_and_grads": _refused(
        "fp16 masters are not carried out, since they lose each update below a 2048th of its weight; remove it, or use bf16 "
        "with bf16_master_weights_and_grads and bf16_optimizer_states"
    ),
    "bf16.immediate_grad_update": _no_effect("no effect: gradients are reduced as backward goes", True, False),
    "torch_autocast.lower_precision_safe_modules": _no_effect(
        "no effect: it names whose gradients DeepSpeed sends in half precision; here all are sent in fp32, or in "
        "communication_data_type"
    ),
    # ZeRO
    "zero_optimization.allgather_partitions": _no_effect("no effect: nothing in DeepSpeed reads it either", True),
    "zero_optimization.compute_grad_norm": _no_effect("no effect: the gradient norm is always computed", True),
    "zero_optimization.ignore_unused_parameters": _no_effect(
        "no effect: a parameter without a gradient is no error", True
    ),
    "zero_optimization.pipeline_loading_checkpoint": _no_effect("no effect: each rank loads its own shards"),
    "zero_optimization.override_module_apply": _no_effect("no effect: there is no zero.Init to patch for", True),
    "zero_optimization.log_trace_cache_warnings": _no_effect("no effect: FSDP2 keeps no trace of modules"),
    "zero_optimization.enable_sanity_checks": _no_effect("no effect: these are checks of DeepSpeed's stage 3"),
    "zero_optimization.contiguous_gradients": _no_effect(FSDP_OWN, True),
    "zero_optimization.reduce_scatter": _no_effect("no effect: gradients are always reduce-scattered", True),
    "zero_optimization.reduce_bucket_size": _no_effect(FSDP_OWN, 500_000_000),
    "zero_optimization.allgather_bucket_size": _no_effect(FSDP_OWN, 500_000_000),
    "zero_optimization.use_multi_rank_bucket_allreduce": _no_effect(FSDP_OWN, True),
    "zero_optimization.overlap_comm": _no_effect("no effect: FSDP2 always overlaps", True, False),
    "zero_optimization.round_robin_gradients": _no_effect(FSDP_OWN),
    "zero_optimization.cpu_offload_use_pin_memory": _no_effect(
        "no effect: DeepSpeed reads pin_memory of the offload blocks"
    ),
    "zero_optimization.zenflow": _refused(LATER),
    "zero_optimization.sub_group_size": _no_effect("no effect: the optimizer steps over each shard", 1_000_000_000),
    "zero_optimization.stage3_prefetch_bucket_size": _no_effect(FSDP_OWN, 50_000_000),
    "zero_optimization.prefetch_bucket_size": _no_effect(FSDP_OWN, 50_000_000),
    "zero_optimization.stage3_param_persistence_threshold": _no_effect(
        "no effect: every parameter of a block is sharded, however small", 100_000
    ),
    "zero_optimization.param_persistence_threshold": _no_effect(
        "no effect: every parameter of a block is sharded, however small", 100_000
    ),
    "zero_optimization.stage3_model_persistence_threshold": _no_effect(
        "no effect: every parameter of a block is sharded, however small"
    ),
    "zero_optimization.model_persistence_threshold": _no_effect(
        "no effect: every parameter of a block is sharded, however small"
    ),
    "zero_optimization.stage3_max_live_parameters": _no_effect(
        "no effect: one block, and the next one, are gathered at a time", 1_000_000_000
    ),
    "zero_optimization.max_live_parameters": _no_effect(
        "no effect: one block, and the next one, are gathered at a time", 1_000_000_000
    ),
    "zero_optimization.stage3_max_reuse_distance": _no_effect("no effect: blocks are dropped after use", 1_000_000_000),
    "zero_optimization.max_reuse_distance": _no_effect("no effect: blocks are dropped after use", 1_000_000_000),
    "zero_optimization.stage3_module_granularity_threshold": _no_effect(FSDP_OWN, 0),
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": _no_effect(FSDP_OWN),
    "zero_optimization.stage3_allgather_sequential": _no_effect(FSDP_OWN),
    "zero_optimization.module_granularity_threshold": _no_effect(FSDP_OWN, 0),
    "zero_optimization.use_all_reduce_for_fetch_params": _no_effect(FSDP_OWN),
    "zero_optimization.allgather_sequential": _no_effect(FSDP_OWN),
    "zero_optimization.load_from_fp32_weights": _no_effect("no effect: checkpoints hold the fp32 masters", True),
    "zero_optimization.elastic_checkpoint": _no_effect("no effect: checkpoints load at any number of ranks"),
    "zero_optimization.legacy_stage1": _refused("was removed from DeepSpeed, and is not carried out here"),
    "zero_optimization.parameter_alignment": _no_effect(FSDP_OWN),
    "zero_optimization.zero_hpz_partition_size": _refused("hybrid sharding " + LATER, 1),
    "zero_optimization.zero_quantized_weights": _refused("quantized communication " + LATER),
    "zero_optimization.zero_quantized_nontrainable_weights": _refused("quantized communication " + LATER),
    "zero_optimization.zero_quantized_gradients": _refused("quantized communication " + LATER),
    "zero_optimization.mics_shard_size": _refused("hybrid sharding " + LATER, -1),
    "zero_optimization.mics_hierarchical_params_gather": _refused("hybrid sharding " + LATER),
    "zero_optimization.zeropp_loco_param": _refused("quantized communication " + LATER),
    "zero_optimization.memory_efficient_linear": _no_effect("no effect", True),
    "zero_optimization.save_muon_momentum_buffer_in_memory": _no_effect(
        "no effect: the momentum lies with the optimizer's state"
    ),
    "zero_optimization.leaf_module": _no_effect("no effect: blocks are gathered whole"),
    # optimizer and scheduler: their types are checked below
    "optimizer.legacy_fusion": _no_effect("no effect"),
    "optimizer.params.max_grad_norm": _refused("DeepSpeed refuses it too; write gradient_clipping at the top level"),
    "optimizer.params.per_head_muon": _refused("Muon by attention head " + LATER),
    "optimizer.params.set_grad_none": _no_effect("no effect: zero_grad() always sets gradients to None", True),
    "optimizer.params.fp32_optimizer_states": _no_effect("no effect: optimizer states are fp32", True),
    # the rest
    "activation_checkpointing.partition_activations": _no_effect(
        "no effect: it splits checkpoints over the ranks that share a layer, and there is one"
    ),
    "activation_checkpointing.contiguous_memory_optimization": _no_effect(
        "no effect: each checkpoint keeps its inputs as they are"
    ),
    "flops_profiler.recompute_fwd_factor": _no_effect("no effect: what is computed again is counted, not guessed"),
    "activation_checkpointing.number_checkpoints": _no_effect("no effect: only contiguous checkpoints read it"),
    "tensor_parallel": _refused("tensor parallelism " + LATER),
    "expert_parallel": _refused("expert parallelism " + LATER),
    "pipeline": _no_effect("no effect: models are not cut into a pipeline yet"),
    "compile": _refused(
        'DeepCompile is DeepSpeed\'s own; write {"dsplan": {"compile": true}} for torch.compile, or use --engine deepspeed'
    ),
    "compression_training": _refused(LATER),
    "quantize_training": _refused(LATER),
    "sparse_gradients": _refused(
        "was removed from DeepSpeed; build the embedding with sparse=True, which ZeRO stage 0 reduces by rows"
    ),
    "sparse_attention": _refused(LATER),
    "graph_harvesting": _refused(LATER),
    "amp": _refused("apex is not carried out; use fp16 or bf16"),
    "eigenvalue": _refused(LATER),
    "progressive_layer_drop": _refused(LATER),
    "curriculum_learning": _refused(LATER),
    "data_efficiency": _refused(LATER),
    "elasticity": _refused(LATER),
    "hybrid_engine": _refused("generation with ZeRO weights " + LATER),
    "weight_quantization": _refused(LATER),
    "autotuning": _no_effect("no effect: dsplan tune is the way"),
    "timers": _no_effect(SILENT),
    "aio": _no_effect("no effect without NVMe offload"),
    "checkpoint.load_universal": _no_effect("no effect: checkpoints load at any number of ranks"),
    "checkpoint.use_node_local_storage": _refused(
        "is not carried out by the native engine: every rank writes to one folder, which all must share; use false"
    ),
    "checkpoint.parallel_write": _no_effect("no effect: every rank writes its own shards at the same time"),
    "checkpoint.checkpoint_serialization": _no_effect("no effect: checkpoints are safetensors", True),
    "checkpoint.writer.type": _no_effect("no effect: files are written as Python writes them", "PYTHON", "python"),
    "checkpoint.writer.io_buffer_size": _no_effect("no effect: there is no buffer between"),
    "checkpoint.writer.io_buffer_double": _no_effect("no effect: there is no buffer between", True),
    "checkpoint.writer.show_statistics": _no_effect(SILENT),
    "checkpoint.writer.data_parallel": _no_effect("no effect: every rank writes its own shards at the same time"),
    "checkpoint.writer.io_multiplier": _no_effect("no effect: every rank writes its own shards at the same time"),
    "datastates_ckpt": _refused(LATER),
    "nebula": _refused(LATER),
    "inference": _no_effect("no effect in training"),
}

OPTIMIZERS = (
    "Adam", "AdamW", "SGD", "Adagrad", "Lion", "Lamb", "Muon", "RMSprop", "Adamax", "NAdam", "RAdam", "Adadelta",
)  # fmt: skip
DEEPSPEED_SCHEDULERS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")
TORCH_SCHEDULERS = (
    "StepLR", "MultiStepLR", "ConstantLR", "LinearLR", "ExponentialLR", "PolynomialLR", "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts", "CyclicLR", "OneCycleLR",
)  # fmt: skip
"""Of torch.optim.lr_scheduler, what a JSON can describe and no loss steers."""
SCHEDULERS = DEEPSPEED_SCHEDULERS + TORCH_SCHEDULERS
NEEDS_ENABLED = (
    "expert_parallel", "amp", "eigenvalue", "progressive_layer_drop", "curriculum_learning",
    "elasticity", "hybrid_engine", "autotuning", "nebula", "zero_optimization.zenflow",
)  # fmt: skip
"""Blocks that are off unless their `enabled` is true (zenflow has none: its presence switches it on)."""


def reasons(raw_config: Mapping[str, Any]) -> list[tuple[str, Level, str]]:
    """(pointer, level, text) for everything in the file that the native engine does not carry out, in file order."""
    found: list[tuple[str, Level, str]] = []
    for path, value in _walk(raw_config, ()):
        support = KEYS.get(".".join(_read_as(path, raw_config)))
        if support is not None and not _asks_for_nothing(path, value, support):
            found.append((_pointer(path), "error" if support.refused else "warning", support.reason))
    found += _types(raw_config)
    found += precision_reasons(raw_config, _stage(raw_config))
    found += offload_reasons(raw_config, _stage(raw_config))
    return found


def _stage(raw: Mapping[str, Any]) -> int:
    zero = raw.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else int(zero is True)
    return stage if isinstance(stage, int) else 0


def _read_as(path: tuple[str, ...], raw: Mapping[str, Any]) -> tuple[str, ...]:
    """bfloat16 is read as bf16 where there is no bf16."""
    return ("bf16", *path[1:]) if path[0] == "bfloat16" and raw.get("bf16") is None else path


def _walk(value: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every key with its value. What lies inside a key of the table is judged with it."""
    for key, member in value.items():
        here = (*path, str(key))
        yield here, member
        if isinstance(member, Mapping) and ".".join(here) not in KEYS:
            yield from _walk(member, here)


def _asks_for_nothing(path: tuple[str, ...], value: Any, support: Support) -> bool:
    if isinstance(value, bool):  # false asks for something only where true is what happens anyway
        asked_by_false = any(ok is True for ok in support.harmless)
        return any(value is ok for ok in support.harmless) or (value is False and not asked_by_false)
    if value in OFF or value in support.harmless:
        return True
    if not isinstance(value, Mapping):
        return False
    if path == ("tensor_parallel",):
        return value.get("autotp_size", 0) in (0, 1, None, "auto")
    if path == ("compile",):
        return value.get("deepcompile", False) in OFF
    if path == ("data_efficiency",):
        return not _anything_enabled(value)
    return ".".join(path) in NEEDS_ENABLED and value.get("enabled", False) in OFF and path[-1] != "zenflow"


def _anything_enabled(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    return value.get("enabled") is True or any(_anything_enabled(member) for member in value.values())


def _types(raw: Mapping[str, Any]) -> Iterator[tuple[str, Level, str]]:
    """Names that the file gives in optimizer, scheduler and dsplan."""
    optimizer = _name(raw, "optimizer", "type")
    if optimizer is not None and optimizer.lower() not in [name.lower() for name in OPTIMIZERS]:
        yield (
            "/optimizer/type",
            "error",
            f"{optimizer} is not carried out by the native engine; use one of {', '.join(OPTIMIZERS)}, or pass an "
            "optimizer object to initialize",
        )
    scheduler = _name(raw, "scheduler", "type")
    if scheduler is not None and scheduler not in SCHEDULERS:
        yield (
            "/scheduler/type",
            "error",
            f"{scheduler} is not carried out by the native engine; use one of {', '.join(SCHEDULERS)}, or pass a torch "
            "scheduler to initialize",
        )
    own = raw["dsplan"] if isinstance(raw.get("dsplan"), Mapping) else {}
    for name, what, one in (
        ("pipeline_stages", "pipelines are", 1),
        ("pipeline_schedule", "pipelines are", "1f1b"),
        ("tensor_parallel", "tensor parallelism is", 1),
        ("sequence_parallel", "sequence parallelism is", False),
        ("dp_replicate", "hybrid sharding is", 1),
    ):
        if own.get(name) not in (None, one):
            yield f"/dsplan/{name}", "error", f"{what} not carried out by the native engine yet; use {json.dumps(one)}"


def _name(raw: Mapping[str, Any], block: str, key: str) -> str | None:
    member = raw.get(block)
    value = member.get(key) if isinstance(member, Mapping) else None
    return value if isinstance(value, str) else None


def _pointer(path: tuple[str, ...]) -> str:
    """RFC 6901."""
    return "".join("/" + step.replace("~", "~0").replace("/", "~1") for step in path)
