"""Muon over shards: each matrix is gathered, orthogonalised whole, and each rank keeps its own rows of the update."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from dsplan.runtime.optimizing.clipping import local_part
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import AdamW, Optimizer
from torch.optim import Muon as TorchMuon
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

Method = Literal["gram", "standard"]
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5
SMALLEST_NORM = 1e-7
"""Source of the three: https://kellerjordan.github.io/posts/muon/, and deepspeed/runtime/zero/muon/original_muon.py."""
RESTART = 2
"""The iteration at which the Gram matrix is worked out anew. Source: original_muon.py, zeropower_via_gram_newtonschulz."""
NO_MATRIX = ("embed", "lm_head")
"""Words in names of parameters that Adam trains. Source: deepspeed/__init__.py, set_optimizer_flags (0.19.8)."""


def is_muons(name: str, parameter: torch.Tensor) -> bool:
    """Whether DeepSpeed's Muon trains that parameter itself: of two dims or more, and neither embedding nor head by name."""
    return parameter.dim() >= 2 and not any(word in name.lower() for word in NO_MATRIX)


class Muon(Optimizer):
    """DeepSpeed's Muon: momentum, orthogonalised, for groups with use_muon; AdamW for the others.

    x = x (1 - lr decay) - lr sqrt(max(1, rows / columns)) orthogonal(b m + (1 - b) g). At ZeRO 0 step() orthogonalises what
    was clipped; at ZeRO 1 to 3 orthogonalise() comes first, and norm and clipping are those of its result.
    Source: deepspeed/runtime/zero/muon/{muon_optimizer,original_muon}.py, zero/stage_1_and_2.py, step (0.19.8).
    """

    def __init__(self, groups: list[dict[str, Any]], *, adam_w_mode: bool = True):
        for group in groups:
            muons = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0, "ns_method": "gram"}
            adams = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}
            for key, value in (muons if group["use_muon"] else adams).items():
                group.setdefault(key, value)
            if group["use_muon"] and group["ns_method"] not in get_args(Method):
                raise ValueError(f"ns_method is {group['ns_method']!r}, but must be gram or standard")
            if group["lr"] < 0 or not 0 <= group.get("momentum", 0) < 1:
                raise ValueError("lr must be at least 0, and momentum 0 to below 1")
        super().__init__(groups, {})
        others = [group for group in self.param_groups if not group["use_muon"]]
        self._adam = AdamW(others, fused=True) if others else None
        self._orthogonalised = False
        for group in others:
            group["decoupled_weight_decay"] = adam_w_mode

    @torch.no_grad()
    def orthogonalise(self, scale: float) -> None:
        """Put in the place of each matrix's gradient, which is multiplied by scale, the update it gives, multiplied likewise.

        The next step() takes them as they are then.
        """
        for group in self.param_groups:
            for parameter in group["params"] if group["use_muon"] else ():
                if parameter.grad is not None:
                    grad = local_part(parameter.grad)
                    grad.div_(scale)
                    grad.copy_(self._orthogonal(parameter, group)).mul_(scale)
        self._orthogonalised = True

    def _orthogonal(self, parameter: nn.Parameter, group: dict[str, Any]) -> torch.Tensor:
        """This rank's rows of the update, after the gradient was taken into the momentum. Collective."""
        blend = _momentum(self.state[parameter], parameter, group["momentum"], nesterov=True)
        return on_whole(parameter, blend, functools.partial(_update, method=group["ns_method"]))

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"] if group["use_muon"] else ():
                if parameter.grad is None:
                    continue
                update = local_part(parameter.grad) if self._orthogonalised else self._orthogonal(parameter, group)
                shard = local_part(parameter)
                shard.mul_(1 - group["lr"] * group["weight_decay"])
                shard.sub_(update.to(shard.device), alpha=group["lr"])
        self._orthogonalised = False
        if self._adam is not None:
            self._adam.param_groups = [group for group in self.param_groups if not group["use_muon"]]
            self._adam.state = self.state
            self._adam.step()
        return loss


class MuonOnShards(TorchMuon):
    """torch.optim.Muon where its parameters are shards: the same numbers as over whole matrices."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                blend = _momentum(self.state[parameter], parameter, group["momentum"], nesterov=group["nesterov"])
                settings = {key: group[key] for key in ("ns_coefficients", "ns_steps", "eps")}
                whole = on_whole(parameter, blend, functools.partial(_torchs, **settings))
                shard = local_part(parameter)
                shard.mul_(1 - group["lr"] * group["weight_decay"])
                lr = _adjust_lr(group["lr"], group["adjust_lr_fn"], parameter.shape)
                shard.sub_(whole.to(shard.device, shard.dtype), alpha=lr)
        return loss


def on_whole(
    parameter: nn.Parameter, shard: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """This rank's rows of function(the whole tensor), of which every rank holds a shard as it does of the parameter.

    Collective. Shards on the host are gathered, and the function is worked out, on the device of the mesh.
    """
    if not isinstance(parameter, DTensor):
        return function(shard)
    mesh, placements = parameter.device_mesh, parameter.placements
    device = torch.device(mesh.device_type, torch.cuda.current_device()) if mesh.device_type == "cuda" else shard.device
    cut = DTensor.from_local(
        shard.to(device), mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    whole = function(cut.full_tensor())
    return distribute_tensor(whole, mesh, list(placements), src_data_rank=None).to_local()


def _momentum(state: dict[str, Any], parameter: nn.Parameter, momentum: float, *, nesterov: bool) -> torch.Tensor:
    """This rank's part of what is to be orthogonalised, after the gradient was taken into the momentum."""
    if not state:
        state["momentum_buffer"] = torch.zeros_like(parameter)
    assert parameter.grad is not None
    grad, mean = local_part(parameter.grad), local_part(state["momentum_buffer"])
    mean.lerp_(grad, 1 - momentum)
    return grad.lerp(mean, momentum) if nesterov else mean


def _update(matrix: torch.Tensor, method: Method) -> torch.Tensor:
    """Of a convolution's filter each row is one output channel. More than two dims else are a batch of matrices."""
    rows, columns = matrix.shape[-2:]
    flat = matrix.reshape(len(matrix), -1) if matrix.dim() == 4 else matrix
    whole = orthogonal(flat, method).to(matrix.dtype)
    return whole.mul_(math.sqrt(max(1.0, rows / columns))).reshape(matrix.shape)


def _torchs(matrix: torch.Tensor, **settings: Any) -> torch.Tensor:
    return _zeropower_via_newtonschulz(matrix, **settings).to(matrix.dtype)


def orthogonal(matrix: torch.Tensor, method: Method) -> torch.Tensor:
    """U V' of matrix = U S V', roughly: five Newton-Schulz steps, in half precision where the device multiplies it fast.

    gram does them on the small square X X' and multiplies X by the result, twice in all.
    Source of gram: https://tridao.me/blog/2026/gram-newton-schulz/.
    """
    dtype = torch.bfloat16 if method == "standard" else torch.float16 if matrix.is_cuda else torch.float32
    tall = matrix.shape[-2] > matrix.shape[-1]
    wide = matrix.mT if tall else matrix
    if method == "standard":
        wide = wide.to(dtype)
    wide = (wide / (wide.norm(dim=(-2, -1), keepdim=True) + SMALLEST_NORM)).to(dtype)
    square = wide.shape[-2] >= wide.shape[-1]
    done = _by_gram(wide) if method == "gram" and not square else _by_whole(wide)
    return done.mT if tall else done


def _by_whole(wide: torch.Tensor) -> torch.Tensor:
    a, b, c = COEFFICIENTS
    for _ in range(NUM_ITERATIONS):
        gram = wide @ wide.mT
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide


def _by_gram(wide: torch.Tensor) -> torch.Tensor:
    """p(R) = aI + bR + cR², applied to X on the left, turns the Gram matrix R = X X' into p(R) R p(R)."""
    a, b, c = COEFFICIENTS
    for many in (RESTART, NUM_ITERATIONS - RESTART):
        gram = wide @ wide.mT
        product: torch.Tensor | None = None
        for left in reversed(range(many)):
            higher = b * gram + c * gram @ gram
            if product is None:
                product = higher.clone()
                product.diagonal(dim1=-2, dim2=-1).add_(a)
            else:
                product = a * product + higher @ product
            if left:
                half = a * gram + higher @ gram
                gram = a * half + higher @ half
        assert product is not None
        wide = product @ wide
    return wide
