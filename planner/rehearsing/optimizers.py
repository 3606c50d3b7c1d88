"""torch's own optimizers, by what memory knows of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dsplan.schemas.optimizer import OPTIMIZER_TYPES, OptimizerSpec, kernel_of
from dsplan.schemas.problem import Problem
from torch import optim

_NO_KERNELS = ("muon",)


def params_of(spec: OptimizerSpec) -> dict[str, Any]:
    """Only what changes bytes; lr and the like do not."""
    params: dict[str, Any] = {"lr": 1e-3}
    if spec.momentum:
        params["momentum"] = 0.9
    if spec.weight_decay:
        params["weight_decay"] = 0.01
    if spec.amsgrad:
        params["amsgrad"] = True
    return params


def torch_optimizer(spec: OptimizerSpec) -> Callable[[Any], optim.Optimizer]:
    """Makes the optimizer over whatever parameters an engine comes to hold. Problem where torch has none such."""
    kind = getattr(optim, OPTIMIZER_TYPES[spec.name], None)
    if kind is None or spec.state_dtype != "fp32":
        raise Problem(f"rehearsal with optimizer {spec.label} is not available: torch has none; the formula stands")
    options = params_of(spec)
    kernel = kernel_of(spec)
    if kernel == "fused":
        options["fused"] = True
    elif spec.name not in _NO_KERNELS:
        options["foreach"] = kernel == "foreach"
    return lambda params: kind(params, **options)
