"""zero.Init and zero.GatheredParameters: models are built whole on each rank and sharded by initialize."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from dsplan.schemas.problem import Problem
from torch.distributed.tensor import DTensor


@contextmanager
def Init(*_: Any, **__: Any) -> Iterator[None]:
    yield


@contextmanager
def GatheredParameters(params: Any, modifier_rank: int | None = None, *_: Any, **__: Any) -> Iterator[None]:
    """Before initialize parameters are whole. After it they are not given out whole: refused."""
    members: Iterable[Any] = [params] if isinstance(params, torch.Tensor) else params
    if any(isinstance(member, DTensor) for member in members):
        raise Problem("zero.GatheredParameters after initialize is not carried out by the native engine yet")
    yield
