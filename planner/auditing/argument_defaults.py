"""What an optimizer or a schedule takes for a parameter that the file does not name.

Sources: deepspeed/runtime/lr_schedules.py; deepspeed/ops (FusedAdam, FusedLamb, FusedLion), torch.optim.SGD: the classes' arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_WARMUP = {"warmup_num_steps": 1000, "warmup_type": "log", "last_batch_iteration": -1}
_ADAM = {
    "lr": 0.001,
    "betas": [0.9, 0.999],
    "eps": 1e-8,
    "weight_decay": 0.0,
    "bias_correction": True,
    "amsgrad": False,
}
SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "WarmupLR": {**_WARMUP, "warmup_min_lr": 0.0},
    "WarmupDecayLR": {**_WARMUP, "warmup_min_lr": 0.0, "warmup_max_lr": 0.001},
    "WarmupCosineLR": {**_WARMUP, "warmup_min_ratio": 0.0, "cos_min_ratio": 0.0001},
    "OneCycle": {
        "decay_lr_rate": 0.0,
        "cycle_first_step_size": 2000,
        "cycle_first_stair_count": 0,
        "decay_step_size": 0,
        "cycle_momentum": True,
        "cycle_min_mom": 0.8,
        "cycle_max_mom": 0.9,
        "decay_mom_rate": 0.0,
        "last_batch_iteration": -1,
    },
    "LRRangeTest": {
        "lr_range_test_min_lr": 0.001,
        "lr_range_test_step_size": 2000,
        "lr_range_test_step_rate": 1.0,
        "lr_range_test_staircase": False,
        "last_batch_iteration": -1,
    },
}
"""By the exact name. WarmupLR takes warmup_max_lr from the optimizer's lr."""
OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "adam": {**_ADAM, "adam_w_mode": True},
    "adamw": {**_ADAM, "adam_w_mode": True},
    "lamb": {**_ADAM, "eps_inside_sqrt": False, "max_coeff": 10.0, "min_coeff": 0.01},
    "lion": {"lr": 0.001, "betas": [0.9, 0.999], "weight_decay": 0.0},
    "sgd": {"lr": 0.001, "momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": False, "maximize": False},
}
"""By the name in lower case."""
IMPLEMENTATION = ("torch_adam", "set_grad_none", "fused", "foreach", "capturable", "differentiable")
"""Parameters that choose how an optimizer computes, and not what."""


def argument_defaults(block: str, kind: Any, lr: Any = None) -> Mapping[str, Any]:
    """Those of optimizer or scheduler (`block`) of that type; empty where it is not known. lr: the optimizer's."""
    if not isinstance(kind, str):
        return {}
    if block == "optimizer":
        return OPTIMIZERS.get(kind.lower(), {})
    peak = {"warmup_max_lr": lr} if kind == "WarmupLR" and lr is not None else {}
    return {**SCHEDULES.get(kind, {}), **peak}
