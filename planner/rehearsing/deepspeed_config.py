"""The configuration and the optimizer that a rehearsal hands to DeepSpeed: the user's own, with the plan laid over it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from dsplan.planner.rehearsing.optimizers import params_of, torch_optimizer
from dsplan.planner.rehearsing.rehearsal import MICRO_BATCHES
from dsplan.schemas.config import AUTO
from dsplan.schemas.optimizer import OPTIMIZER_TYPES, OptimizerSpec, optimizer_named
from dsplan.schemas.plan import Plan
from dsplan.schemas.problem import Problem

NOT_OF_A_STEP = (
    "train_batch_size",
    "scheduler",
    "tensorboard",
    "wandb",
    "comet",
    "csv_monitor",
    "monitor_config",
    "flops_profiler",
    "comms_logger",
    "wall_clock_breakdown",
    "memory_breakdown",
    "dump_state",
    "autotuning",
    "elasticity",
    "nebula",
    "checkpoint",
    "data_efficiency",
    "curriculum_learning",
    "compile",
    "dsplan",
)
"""Top-level keys that change no byte of a step, and would write files, start programs or ask for data."""


def accumulation_of(plan: Plan) -> int:
    return min(plan.accumulation, MICRO_BATCHES)


def config_of(plan: Plan, user: Mapping[str, Any] | None, accumulation: int) -> dict[str, Any]:
    """DeepSpeed's configuration of the plan: what `user` says stays, but for what the plan decides and what needs the outside."""
    config: dict[str, Any] = {
        key: copy.deepcopy(value) for key, value in _without_auto(user or {}).items() if key not in NOT_OF_A_STEP
    }
    config |= {
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": accumulation,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }
    config["zero_optimization"] = _zero(plan, config.get("zero_optimization"))
    if plan.knobs.grad_accum_dtype is not None:
        config["data_types"] = {**config.get("data_types", {}), "grad_accum_dtype": plan.knobs.grad_accum_dtype}
    if plan.knobs.communication_dtype is not None:
        config["communication_data_type"] = plan.knobs.communication_dtype
    for precision, names in (("fp16", ("fp16",)), ("bf16", ("bf16", "bfloat16"))):
        block: dict[str, Any] = next(
            (config.pop(name) for name in reversed(names) if isinstance(config.get(name), dict)), {}
        )
        if plan.precision == precision:
            config[precision] = _precision(plan, block)
    if plan.knobs.grad_accum_dtype is not None:
        config["data_types"] = {"grad_accum_dtype": plan.knobs.grad_accum_dtype}
    if plan.knobs.communication_dtype is not None:
        config["communication_data_type"] = plan.knobs.communication_dtype
    if not _is_users(plan.optimizer, user):
        config.pop("optimizer", None)
        if plan.optimizer.kernel == "fused":
            config["optimizer"] = {"type": OPTIMIZER_TYPES[plan.optimizer.name], "params": params_of(plan.optimizer)}
    return config


def client_optimizer(plan: Plan, user: Mapping[str, Any] | None, model: Any) -> Any:
    """torch's own optimizer over the model's parameters, where the plan asks for one of its kernels; None: DeepSpeed makes it."""
    if plan.optimizer.kernel == "fused" or _is_users(plan.optimizer, user):
        if plan.optimizer.state_dtype != "fp32":
            raise Problem(f"rehearsal with optimizer {plan.optimizer.label} is not available; the formula stands")
        return None
    return torch_optimizer(plan.optimizer)([param for param in model.parameters() if param.requires_grad])


def _is_users(spec: OptimizerSpec, user: Mapping[str, Any] | None) -> bool:
    """Whether the plan's optimizer is the one that the user's configuration names, kernel and all."""
    block = (user or {}).get("optimizer")
    kind = block.get("type") if isinstance(block, Mapping) else None
    named = optimizer_named(kind) if isinstance(kind, str) else None
    return named is not None and named.name == spec.name and spec.kernel == "fused"


def _zero(plan: Plan, user: Any) -> dict[str, Any]:
    knobs = plan.knobs
    zero: dict[str, Any] = dict(user) if isinstance(user, Mapping) else {}
    zero |= {
        "stage": plan.zero_stage,
        "reduce_bucket_size": knobs.reduce_bucket_size,
        "allgather_bucket_size": knobs.allgather_bucket_size,
        "contiguous_gradients": knobs.contiguous_gradients,
        "stage3_prefetch_bucket_size": knobs.prefetch_bucket_size,
        "stage3_param_persistence_threshold": knobs.param_persistence_threshold,
        "stage3_max_live_parameters": knobs.max_live_parameters,
        "sub_group_size": knobs.sub_group_size,
        "stage3_max_reuse_distance": knobs.max_reuse_distance,
        "stage3_model_persistence_threshold": knobs.model_persistence_threshold,
        "reduce_scatter": knobs.reduce_scatter,
        "use_multi_rank_bucket_allreduce": knobs.multi_rank_allreduce,
        "round_robin_gradients": knobs.round_robin_gradients,
        "memory_efficient_linear": knobs.memory_efficient_linear,
    }
    if knobs.hpz_partition_size > 1:
        zero["zero_hpz_partition_size"] = knobs.hpz_partition_size
    if knobs.overlap_comm is not None:
        zero["overlap_comm"] = knobs.overlap_comm
    wanted = {"none": (), "optimizer": ("offload_optimizer",), "param": ("offload_optimizer", "offload_param")}
    for key in ("offload_optimizer", "offload_param"):
        block = zero.pop(key, None)
        if key in wanted[plan.offload]:
            zero[key] = {**block, "device": "cpu"} if isinstance(block, Mapping) else {"device": "cpu"}
    if "offload_optimizer" in zero and knobs.offload_ratio < 1:
        zero["offload_optimizer"]["ratio"] = knobs.offload_ratio
    return zero


def _precision(plan: Plan, user: Mapping[str, Any]) -> dict[str, Any]:
    block: dict[str, Any] = {**user, "enabled": True}
    if plan.knobs.low_precision_masters:
        key = "fp16_master_weights_and_grads" if plan.precision == "fp16" else "bf16_master_weights_and_grads"
        block[key] = True
    if plan.knobs.low_precision_states and plan.precision == "bf16":
        block["bf16_optimizer_states"] = True
    return block


def _without_auto(value: Any) -> Any:
    """Keys that say "auto" count as absent."""
    if isinstance(value, Mapping):
        return {key: _without_auto(member) for key, member in value.items() if member != AUTO}
    return value
