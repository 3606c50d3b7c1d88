"""What scripts import from deepspeed.utils."""

from __future__ import annotations

from typing import Any

from dsplan.runtime.values import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from torch import nn

from . import groups
from .logging import log_dist, logger

__all__ = [
    "RepeatingLoader",
    "groups",
    "instrument_w_nvtx",
    "log_dist",
    "logger",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "set_z3_leaf_modules",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
]


def instrument_w_nvtx(function: Any) -> Any:
    """Without ranges for a profiler."""
    return function


class RepeatingLoader:
    """An iterator that begins its loader again where it ends."""

    def __init__(self, loader: Any):
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


def set_z3_leaf_modules(model: nn.Module, leaf_module_classes: list[Any]) -> list[nn.Module]:
    """Blocks are gathered whole here, so that no module needs to be declared a leaf."""
    return []


def unset_z3_leaf_modules(model: nn.Module, leaf_module_classes: list[Any]) -> list[nn.Module]:
    return []


def z3_leaf_module(model: nn.Module) -> bool:
    return False
