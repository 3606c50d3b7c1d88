"""Methods of a model beside forward: parameters are gathered for them too, where they are given tensors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Generic

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.utils._pytree import tree_leaves


def register_methods(model: Any, drop_gathered: Callable[[], None]) -> None:
    """Every public method of the classes that define the model's forward, and of its mixins: `encode(x)`, `generate(x)` say."""
    inside: list[str] = []
    for name in _own_methods(type(model)):
        plain = getattr(model, name)
        register_fsdp_forward_method(model, name)
        setattr(model, name, _gathering(model, plain, getattr(model, name), drop_gathered, inside))


def _own_methods(kind: type) -> list[str]:
    """Names; without those of nn.Module, which mean something else. A mixin is no module by itself."""
    found: dict[str, None] = {}
    for base in kind.__mro__:
        mixin = not issubclass(base, nn.Module) and base not in (object, Generic)
        if (mixin or (base is not nn.Module and "forward" in vars(base))) and not issubclass(base, FSDPModule):
            found |= dict.fromkeys(name for name, member in vars(base).items() if inspect.isfunction(member))
    return [name for name in found if not name.startswith("_") and not hasattr(nn.Module, name)]


def _gathering(
    model: Any,
    plain: Callable[..., Any],
    gathered: Callable[..., Any],
    drop_gathered: Callable[[], None],
    inside: list[str],
) -> Callable[..., Any]:
    """Called from forward, for its recomputation, or by another method, which `inside` names, it finds the parameters
    gathered; without tensors it needs none."""

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        busy = model._get_fsdp_state()._training_state is not TrainingState.IDLE
        if busy or inside or not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves((args, kwargs))):
            return plain(*args, **kwargs)
        inside.append(plain.__name__)
        try:
            output = gathered(*args, **kwargs)
        finally:
            inside.pop()
        if not torch.is_grad_enabled():
            drop_gathered()  # no backward will
        return output

    return call
