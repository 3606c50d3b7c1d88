"""The global gradient norm over shards and replicas, and scaling by it. torch's own fails on mixed meshes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


@torch.no_grad()
def global_norm(parameters: Iterable[torch.nn.Parameter], device: torch.device) -> torch.Tensor:
    """L2 norm of all gradients as if on one rank, 0-dim fp32. Every rank must call it with the same parameters.

    Shards are summed over the axes on which they are split; a replicated gradient counts once. Not finite on every rank
    where it is not on one.
    """
    held: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {(): []}
    for parameter in parameters:
        grads = held.setdefault(split_over(parameter), [])
        if parameter.grad is not None:
            grads.append(_elements(parameter.grad))
    total = torch.zeros((), dtype=torch.float32, device=device)
    for groups, grads in held.items():
        squares = torch.zeros((), dtype=torch.float32, device=device)
        if grads:
            norms = torch._foreach_norm(grads, 2, dtype=torch.float32)
            squares = torch.stack([norm.to(device) for norm in norms]).square_().sum()
        for group in groups:
            if dist.get_world_size(group) > 1:
                dist.all_reduce(squares, group=group)
        total += squares
    return total.sqrt_()


@torch.no_grad()
def scale_gradients(parameters: Iterable[torch.nn.Parameter], factor: float) -> None:
    """Multiply every gradient in place."""
    grads = [_elements(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if grads and factor != 1.0:
        torch._foreach_mul_(grads, factor)


def clip_factor(norm: float, limit: float) -> float:
    """What gradients of this norm are multiplied by, so that their norm is at most limit; 1 where limit is 0."""
    return min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _elements(grad: torch.Tensor) -> torch.Tensor:
    """This rank's numbers of a gradient; of a sparse one, which is coalesced, its rows."""
    return grad._values() if grad.is_sparse else local_part(grad)


def split_over(parameter: torch.nn.Parameter) -> tuple[dist.ProcessGroup, ...]:
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    return tuple(mesh.get_group(axis) for axis, placement in enumerate(parameter.placements) if placement.is_shard())
