"""Lamb over shards: element by element but for two norms per parameter, which are summed over the ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from dsplan.runtime.optimizing.clipping import local_part, split_over
from dsplan.runtime.optimizing.kinds import refuse_rates
from torch import nn
from torch.optim import Optimizer


class Lamb(Optimizer):
    """Adam whose step is scaled per parameter by |weights| / |update|, held between min_coeff and max_coeff.

    As deepspeed.ops.lamb.FusedLamb (0.19.8, csrc/lamb/fused_lamb_cuda_kernel.cu), not as the paper (arXiv:1904.00962):
    bias correction scales the step and not the update, so that the ratio is taken of the uncorrected update. The norms of
    all parameters travel in one all-reduce; the ratio stays on the device.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ):
        if amsgrad:
            raise ValueError("amsgrad is not part of Lamb")
        refuse_rates(lr, betas)
        super().__init__(
            params,
            {
                "lr": lr, "bias_correction": bias_correction, "betas": tuple(betas), "eps": eps,
                "eps_inside_sqrt": eps_inside_sqrt, "weight_decay": weight_decay, "max_coeff": max_coeff,
                "min_coeff": min_coeff,
            },
        )  # fmt: skip

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        work = [
            (group, parameter)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        if not work:
            return loss
        squares = []
        for group, parameter in work:
            state, (first, second) = self.state[parameter], group["betas"]
            if not state:
                state["step"] = 0
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            state["step"] += 1
            grad = local_part(parameter.grad)
            local_part(state["exp_avg"]).lerp_(grad, 1 - first)
            local_part(state["exp_avg_sq"]).mul_(second).addcmul_(grad, grad, value=1 - second)
            update = self._update(group, parameter)
            squares.append(torch.stack([local_part(parameter).square().sum(), update.square().sum()]))
        norms = _summed(torch.stack(squares), [parameter for _, parameter in work]).sqrt()
        for (group, parameter), (weights, change) in zip(work, norms, strict=True):
            ratio = (weights / change).clamp(group["min_coeff"], group["max_coeff"])
            ratio = torch.where((weights != 0) & (change != 0), ratio, torch.ones_like(ratio))
            local_part(parameter).sub_(
                self._update(group, parameter).mul_(ratio), alpha=self._step_size(group, parameter)
            )
        return loss

    def _update(self, group: dict[str, Any], parameter: nn.Parameter) -> torch.Tensor:
        """Worked out twice, so that no update waits for the norms of all."""
        state, eps = self.state[parameter], group["eps"]
        second = local_part(state["exp_avg_sq"])
        below = second.add(eps).sqrt_() if group["eps_inside_sqrt"] else second.sqrt().add_(eps)
        update = torch.div(local_part(state["exp_avg"]), below, out=below)
        return update.add_(local_part(parameter), alpha=group["weight_decay"]) if group["weight_decay"] else update

    def _step_size(self, group: dict[str, Any], parameter: nn.Parameter) -> float:
        lr, (first, second) = float(group["lr"]), group["betas"]
        if not group["bias_correction"]:
            return lr
        step = self.state[parameter]["step"]
        return float(lr * (1 - second**step) ** 0.5 / (1 - first**step))


def _summed(squares: torch.Tensor, parameters: list[nn.Parameter]) -> torch.Tensor:
    """[parameters, 2] sums of squares of this rank's parts -> of the whole; replicated parameters count once.

    Each set of groups over which parameters are split takes one all-reduce each, by every rank.
    """
    over: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
    for index, parameter in enumerate(parameters):
        over.setdefault(split_over(parameter), []).append(index)
    for groups, members in over.items():
        part = squares[members]
        for group in groups:
            if dist.get_world_size(group) > 1:
                dist.all_reduce(part, group=group)
        squares[members] = part
    return squares
