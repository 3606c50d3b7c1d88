"""Activation checkpointing for a model's own forward, under DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils import checkpoint as torch_checkpoint

_configured = False


def configure(*_: Any, **__: Any) -> None:
    """Accepted; partitioning and moving to the host have no effect here."""
    global _configured
    _configured = True


def is_configured() -> bool:
    return _configured


def reset() -> None:
    """Nothing is kept between steps."""


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=False)
