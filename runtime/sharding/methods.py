"""Methods of a model beside forward: parameters are gathered for them too, where they are given tensors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.utils._pytree import tree_leaves


def register_methods(model: Any, drop_gathered: Callable[[], None]) -> None:
    """Every public method of the classes that define the model's forward, `encode(x)` say."""
    for name in _own_methods(type(model)):
        plain = getattr(model, name)
        register_fsdp_forward_method(model, name)
        setattr(model, name, _gathering(model, plain, getattr(model, name), drop_gathered))


def _own_methods(kind: type) -> list[str]:
    """Names; without those of nn.Module, which mean something else."""
    found: dict[str, None] = {}
    for base in kind.__mro__:
        if base is nn.Module:
            break
        if "forward" in vars(base) and not issubclass(base, FSDPModule):
            found |= dict.fromkeys(name for name, member in vars(base).items() if inspect.isfunction(member))
    return [name for name in found if not name.startswith("_") and not hasattr(nn.Module, name)]


def _gathering(
    model: Any, plain: Callable[..., Any], gathered: Callable[..., Any], drop_gathered: Callable[[], None]
) -> Callable[..., Any]:
    """Called from forward, or for its recomputation, it finds the parameters gathered; without tensors it needs none."""

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        busy = model._get_fsdp_state()._training_state is not TrainingState.IDLE
        if busy or not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves((args, kwargs))):
            return plain(*args, **kwargs)
        output = gathered(*args, **kwargs)
        if not torch.is_grad_enabled():
            drop_gathered()  # no backward will
        return output

    return call
