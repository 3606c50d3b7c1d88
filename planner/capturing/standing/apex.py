"""What apex offers a training script beside its mixed precision: fused norms and optimizers.

Source: apex/normalization/fused_layer_norm.py, apex/optimizers.
"""

from __future__ import annotations

from typing import Any

import torch
from dsplan.planner.capturing.standing import functions
from dsplan.planner.capturing.standing.calls import called
from dsplan.schemas.problem import Problem
from torch import nn

_PACKAGE = "apex"


class FusedLayerNorm(nn.Module):
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, *_: Any, **__: Any):
        super().__init__()
        self.normalized_shape = normalized_shape
        shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
        self.register_parameter("weight", nn.Parameter(torch.ones(shape)) if elementwise_affine else None)
        self.register_parameter("bias", nn.Parameter(torch.zeros(shape)) if elementwise_affine else None)

    def forward(self, input: Any) -> Any:
        called(_PACKAGE, type(self).__name__)
        return functions.layer_norm(input, self.weight, self.bias)


class FusedRMSNorm(FusedLayerNorm):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        del self.bias

    def forward(self, input: Any) -> Any:
        called(_PACKAGE, type(self).__name__)
        return functions.rms_norm(input, self.weight)


class MixedFusedLayerNorm(FusedLayerNorm):
    pass


class MixedFusedRMSNorm(FusedRMSNorm):
    pass


class FusedAdam(torch.optim.AdamW):
    """AdamW, or Adam with adam_w_mode false, in one kernel."""

    def __init__(
        self, params: Any, lr: float = 1e-3, *, adam_w_mode: bool = True, weight_decay: float = 0.0, **options: Any
    ):
        called(_PACKAGE, "FusedAdam")
        known = {key: value for key, value in options.items() if key in ("betas", "eps", "amsgrad")}
        super().__init__(params, lr=lr, weight_decay=weight_decay, **known)


class FusedSGD(torch.optim.SGD):
    def __init__(self, params: Any, lr: float = 1e-3, momentum: float = 0.0, **options: Any):
        called(_PACKAGE, "FusedSGD")
        known = {key: value for key, value in options.items() if key in ("dampening", "weight_decay", "nesterov")}
        super().__init__(params, lr=lr, momentum=momentum, **known)


class FusedLAMB(torch.optim.AdamW):
    """Lamb's states are Adam's."""

    def __init__(self, params: Any, lr: float = 1e-3, **options: Any):
        called(_PACKAGE, "FusedLAMB")
        super().__init__(params, lr=lr)


class amp:
    """Refused: it changes how the model and the optimizer hold their weights, in its own way."""

    @staticmethod
    def initialize(*_: Any, **__: Any) -> Any:
        raise Problem(
            "the script calls apex.amp.initialize(), whose copies are not known here; use fp16 or bf16 of the DeepSpeed "
            "configuration, or torch.autocast"
        )

    init = initialize


_NORMS = {kind.__name__: kind for kind in (FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm)}
MODULES: dict[str, dict[str, Any]] = {
    "apex": {"__version__": "0.1", "amp": amp},
    "apex.normalization": _NORMS,
    "apex.normalization.fused_layer_norm": _NORMS,
    "apex.optimizers": {kind.__name__: kind for kind in (FusedAdam, FusedSGD, FusedLAMB)},
}
