"""DeepSpeed's Adagrad, by torch's."""

from __future__ import annotations

from typing import Any

import torch


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """Where the states live is the engine's affair."""

    def __init__(self, model_params: Any, lr: float = 1e-2, eps: float = 1e-10, weight_decay: float = 0.0, **_: Any):
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)
