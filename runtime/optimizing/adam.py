"""DeepSpeed's Adam where torch's has no option for it."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import AdamW

LONG_AGO = 2.0**40
"""A step at which beta ** step is 0 in fp32, so that 1 - beta ** step, what torch divides by, is 1."""


class FusedAdam(AdamW):
    """AdamW, or Adam with adam_w_mode false, by torch's fused kernel. Weight decay is 0 unless given.

    Without bias correction every step is as one long after the first. Source: deepspeed/ops/adam/fused_adam.py (0.19.8).
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fused: bool = True,
        **options: Any,
    ):
        super().__init__(
            params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad, fused=fused, **options
        )
        self.bias_correction = bias_correction
        for group in self.param_groups:
            group["decoupled_weight_decay"] = adam_w_mode

    def _init_group(self, group: dict[str, Any], *lists: Any) -> Any:
        found = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        if not self.bias_correction:
            for state in (self.state[parameter] for parameter in group["params"] if parameter in self.state):
                if isinstance(state.get("step"), torch.Tensor):
                    state["step"].fill_(LONG_AGO)
        return found
