"""State dicts made ready for torch.save."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Tensors, also in lists, tuples and dicts, as whole plain copies on the device. Every rank must call it for shards."""
    if isinstance(item, torch.Tensor):
        whole = item.full_tensor() if isinstance(item, DTensor) else item
        return whole.detach().to(device, copy=True)
    if isinstance(item, (list, tuple)):
        return type(item)([clone_tensors_for_torch_save(member, device) for member in item])
    if isinstance(item, dict):
        return type(item)({key: clone_tensors_for_torch_save(member, device) for key, member in item.items()})
    return item
