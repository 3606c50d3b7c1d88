"""A sharded model as plain whole tensors on one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from dsplan.runtime.sharding.state_dicts import own_use
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from dsplan.runtime.sharding.stages import Sharded


@torch.no_grad()
def consolidated(sharded: Sharded, dtype: torch.dtype, *, exclude_frozen: bool) -> dict[str, torch.Tensor] | None:
    """Every parameter in dtype, and every persistent buffer as it is, by name, on rank 0's host; None on other ranks. Collective.

    One parameter is whole on the devices at a time. What is shared in the model is shared in the dict.
    """
    sharded.drop_gathered()
    with own_use():
        held: dict[str, torch.Tensor] = sharded.model.state_dict(keep_vars=True)
    first = dist.get_rank() == 0
    seen: dict[int, torch.Tensor] = {}
    whole: dict[str, torch.Tensor] = {}
    for name, tensor in held.items():
        if exclude_frozen and isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad:
            continue
        if id(tensor) not in seen:
            value = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            wanted = dtype if isinstance(tensor, torch.nn.Parameter) and value.is_floating_point() else value.dtype
            seen[id(tensor)] = value.to(device="cpu", dtype=wanted, copy=True) if first else tensor
        whole[name] = seen[id(tensor)]
    return whole if first else None
