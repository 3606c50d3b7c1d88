"""torch.compile's own code (torch._dynamo) is not loaded by who only wants to be left alone by it: two seconds of every estimate."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from dsplan.planner.capturing.when_imported import WhenImported
from torch._compile import _disable_dynamo

DYNAMO = "torch._dynamo"
VMAP_INDEX = f"{DYNAMO}._trace_wrapped_higher_order_op"
"""What transformers imports of it. Source: transformers/masking_utils.py."""
CONFIG = f"{DYNAMO}.config"
"""What a FakeTensorMode reads of it. Source: torch/_subclasses/fake_tensor.py."""


@contextlib.contextmanager
def compiler_put_off() -> Iterator[None]:
    """While on, what asks torch._dynamo to keep away from a function gets that without it; whatever else is asked loads it.

    Functions that torch hides from it run as they are, without a wrapper around each call. Nothing is compiled meanwhile.
    """
    if DYNAMO in sys.modules:
        yield
        return
    stands = _Dynamo()
    index = types.ModuleType(VMAP_INDEX)
    index.TransformGetItemToIndex = _transform  # type: ignore[attr-defined]
    stands.config = _config()
    sys.modules.update({DYNAMO: stands, VMAP_INDEX: index, CONFIG: stands.config})
    try:
        yield
    finally:
        stands.leave()


def is_put_off() -> bool:
    """Whether nobody has needed torch._dynamo since `compiler_put_off` began."""
    return isinstance(sys.modules.get(DYNAMO), _Dynamo)


class _Dynamo(types.ModuleType):
    """Stands for torch._dynamo until something of it is needed."""

    def __init__(self) -> None:
        super().__init__(DYNAMO)
        self.config: types.ModuleType | None = None
        self._as_they_are: list[Any] = []

    def disable(self, fn: Any = None, recursive: bool = True, *, wrapping: bool = True, reason: Any = None) -> Any:
        """As torch's. wrapping False: torch/_compile.py asks, at the first call of a function that it has wrapped."""
        if fn is None:
            return lambda function: self.disable(function, recursive, wrapping=wrapping)
        if wrapping:
            return _disable_dynamo(fn, recursive)
        self._as_they_are.append(fn)
        return fn

    def assume_constant_result(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Source: torch/_dynamo/decorators.py."""
        fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
        return fn

    def allow_in_graph(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Told to torch's own when that is loaded."""
        sys.meta_path.insert(0, WhenImported(DYNAMO, lambda dynamo: dynamo.allow_in_graph(fn)))
        return fn

    def __getattr__(self, name: str) -> Any:
        if name in ("__file__", "__wrapped__", "__warningregistry__"):  # asked by inspect and warnings of every module
            raise AttributeError(name)
        self.leave()
        return getattr(importlib.import_module(DYNAMO), name)

    def leave(self) -> None:
        if is_put_off():
            for name in (DYNAMO, VMAP_INDEX, CONFIG):
                del sys.modules[name]
        for fn in self._as_they_are:  # where torch/_compile.py keeps the answer
            vars(fn).pop("__dynamo_disable", None)
        self._as_they_are.clear()


@functools.cache
def _config() -> types.ModuleType:
    """Its settings, which need nothing else of it. Once torch._dynamo is loaded its own stand there."""
    spec = importlib.util.spec_from_file_location(CONFIG, Path(torch.__file__).parent / "_dynamo" / "config.py")
    assert spec is not None and spec.loader is not None
    made = sys.modules[CONFIG] = importlib.util.module_from_spec(spec)  # where it looks for itself
    try:
        spec.loader.exec_module(made)
    finally:
        del sys.modules[CONFIG]
    return made


def _transform() -> Any:
    """torch's own: indices under vmap stay tensors."""
    stands = sys.modules.get(DYNAMO)
    if isinstance(stands, _Dynamo):
        stands.leave()
    return importlib.import_module(VMAP_INDEX).TransformGetItemToIndex()
