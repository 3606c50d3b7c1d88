"""Lion over shards: element by element, so each rank steps over its own part."""

from __future__ import annotations

from typing import Any

import torch
from dsplan.runtime.optimizing.clipping import local_part
from dsplan.runtime.optimizing.kinds import refuse_rates
from torch.optim import Optimizer


class Lion(Optimizer):
    """x = x (1 - lr decay) - lr sign(b1 m + (1 - b1) g); m = b2 m + (1 - b2) g.

    Source: Chen et al. 2023 (arXiv:2302.06675), algorithm 2. Defaults: deepspeed/ops/lion (0.19.8), whose second beta is
    0.999 where the paper has 0.99.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.0
    ):
        refuse_rates(lr, betas)
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            lr, (first, second), decay = group["lr"], group["betas"], group["weight_decay"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                grad, mean = local_part(parameter.grad), local_part(state["exp_avg"])
                shard = local_part(parameter)
                shard.mul_(1 - lr * decay)
                shard.sub_(mean.lerp(grad, 1 - first).sign_(), alpha=lr)
                mean.lerp_(grad, 1 - second)
        return loss
