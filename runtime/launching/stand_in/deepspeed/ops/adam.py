"""DeepSpeed's Adam classes, by torch's fused ones."""

from __future__ import annotations

from typing import Any

import torch


class FusedAdam(torch.optim.AdamW):
    """AdamW, or Adam with adam_w_mode false. Weight decay is 0 unless given."""

    def __init__(
        self, params: Any, lr: float = 1e-3, *, adam_w_mode: bool = True, weight_decay: float = 0.0, **options: Any
    ):
        for ignored in ("bias_correction", "set_grad_none", "adamw_mode", "fp32_optimizer_states"):
            options.pop(ignored, None)
        super().__init__(params, lr=lr, weight_decay=weight_decay, fused=True, **options)
        if not adam_w_mode:
            for group in self.param_groups:
                group["decoupled_weight_decay"] = False


class DeepSpeedCPUAdam(FusedAdam):
    """As FusedAdam; where the states live is the engine's affair."""
