"""Whether a model tells fp16 from bf16: where it does not, one trace serves both, since their elements are of two bytes."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

_NAMES = frozenset({"float16", "bfloat16", "half", "HalfTensor", "BFloat16Tensor", "dtype_byte_size"})
TWINS = {"fp16": "bf16", "bf16": "fp16"}


def names_half_types(model: nn.Module, beside: Iterable[Callable[..., Any]] = ()) -> bool:
    """Whether code that the model's forward may reach names one of the 16-bit types (as T5's, which clamps in fp16).

    Reached: methods and functions by the names that code uses, from each module's forward on, and `beside`. Code of torch
    itself tells the two apart only by kernels of equal bytes.
    """
    seen: set[types.CodeType] = set()
    waiting: list[tuple[Any, type | None]] = [(function, None) for function in beside]
    kinds = {type(module) for module in model.modules()}
    waiting += [(kind.forward, kind) for kind in kinds if not _of_torch(kind)]
    while waiting:
        found, kind = waiting.pop()
        for function in _functions(found):
            code = function.__code__
            if code in seen or _of_torch(function):
                continue
            seen.add(code)
            for inner in _codes(code):
                if _NAMES & {*inner.co_names, *(value for value in inner.co_consts if isinstance(value, str))}:
                    return True
                for name in inner.co_names:
                    waiting.append((function.__globals__.get(name), None))
                    if kind is not None:
                        waiting.append((getattr(kind, name, None), kind))
            waiting += [(cell.cell_contents, kind) for cell in function.__closure__ or () if _filled(cell)]
    return False


def _functions(value: Any) -> Iterator[types.FunctionType]:
    while hasattr(value, "__wrapped__") and not isinstance(value, types.FunctionType):
        value = value.__wrapped__
    if isinstance(value, functools.partial):
        value = value.func
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, types.MethodType):
        value = value.__func__
    if isinstance(value, types.FunctionType):
        yield value
        if hasattr(value, "__wrapped__"):
            yield from _functions(value.__wrapped__)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _of_torch(value: Any) -> bool:
    return str(getattr(value, "__module__", "") or "").partition(".")[0] == "torch"


def _filled(cell: types.CellType) -> bool:
    try:
        return callable(cell.cell_contents)
    except ValueError:
        return False
