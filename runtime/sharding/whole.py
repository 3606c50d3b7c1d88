"""A sharded parameter made whole for a while, under the very object that people hold."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from dsplan.schemas.problem import Problem
from torch.distributed.tensor import DTensor, distribute_tensor


class Whole(torch.Tensor):
    """A parameter's whole value in the place of its shards.

    Has DTensor's slots, since torch swaps only tensors that have the same, and FSDP2 looks for the shard in them.
    """

    __slots__ = ("_local_tensor", "_spec")
    _local_tensor: torch.Tensor
    _spec: Any
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class Opened:
    """One parameter while it is whole. Opening and closing are collective."""

    def __init__(self, parameter: torch.nn.Parameter):
        assert isinstance(parameter, DTensor)
        held: Any = parameter.detach()
        value = held.full_tensor().clone()
        self.parameter: Any = parameter
        self.shards: Any = torch.Tensor._make_subclass(Whole, value, parameter.requires_grad)
        vars(self.shards).update(vars(parameter))
        self.shards._is_param = True  # isinstance(..., nn.Parameter)
        torch.utils.swap_tensors(parameter, self.shards)  # type: ignore[no-untyped-call]
        # The objects have changed places: the people's is whole now, and `shards` is the DTensor.
        self.parameter._local_tensor, self.parameter._spec = self.shards._local_tensor, self.shards._spec

    @torch.no_grad()
    def close(self, modifier_rank: int | None, *, keep: bool) -> None:
        """Shards again; with what the modifier rank has made of the value, where there is one and `keep`."""
        value = self.parameter.data
        torch.utils.swap_tensors(self.parameter, self.shards)  # type: ignore[no-untyped-call]
        if modifier_rank is None or not keep:
            return
        new = sent_from(value, modifier_rank, self.parameter)
        local = distribute_tensor(
            new, self.parameter.device_mesh, list(self.parameter.placements), src_data_rank=None
        ).to_local()
        self.parameter.to_local().copy_(local)


@torch.no_grad()
def sent_from(value: torch.Tensor, rank: int, like: torch.Tensor) -> torch.Tensor:
    """The value that this rank holds, on every rank, in the type of `like`. Collective. Problem where its shape changed."""
    if value.shape != like.shape:
        raise Problem(
            f"zero.GatheredParameters: a parameter of shape {list(like.shape)} has become {list(value.shape)} inside; change "
            "its values, not its shape"
        )
    sent = value.detach().to(device=like.device, dtype=like.dtype).contiguous()
    if dist.get_world_size() > 1:
        dist.broadcast(sent, src=rank)
    return sent
