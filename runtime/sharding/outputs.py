"""Outputs of FSDP2's units that may be changed in place, as those of the plain model.

FSDP2 hooks a unit's backward onto the tensors that the unit gives. Where one is a view (that of `nn.Linear` with a bias on
three dimensions is), autograd drops the hook at `out += 1`: below stage 3 gradients then go wrong, at stage 3 backward fails.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves, tree_map_only


class _Same(torch.autograd.Function):
    """The tensor itself as an output of its own: storage and version counter are shared, so that autograd still finds what is
    changed after it was kept for backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def give_no_views(units: Iterable[FSDPModule]) -> None:
    """From now on each unit's outputs are no views, where they take part in backward. Goes before FSDP2's own hook."""
    for unit in units:
        assert isinstance(unit, nn.Module)
        unit.register_forward_hook(_without_views, prepend=True)


def _without_views(unit: nn.Module, inputs: Any, output: Any) -> Any:
    if not any(isinstance(leaf, torch.Tensor) and _is_followed_view(leaf) for leaf in tree_leaves(output)):
        return None
    return tree_map_only(torch.Tensor, lambda leaf: _same(leaf) if _is_followed_view(leaf) else leaf, output)


def _same(tensor: torch.Tensor) -> Any:
    return _Same.apply(tensor)  # type: ignore[no-untyped-call]


def _is_followed_view(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and tensor._base is not None
