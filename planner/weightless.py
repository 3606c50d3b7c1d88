"""Modules without weights: built on device meta, and lent fake weights for as long as they are traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.weak import WeakIdKeyDictionary

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""The compute dtype of each precision."""


def build_weightless(build: Callable[[], Any]) -> Any:
    """What `build()` returns, made on device meta; where a model reads values while it is built, only its parameters are.

    The second way costs one parameter's memory at a time. Whatever it raises is the caller's to explain.
    """
    try:
        with torch.device("meta"):
            return build()
    except Exception:
        with parameters_on_meta():
            return build()


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Each parameter goes to device meta as a module takes it in, so that ten billion of them cost nothing."""
    original = nn.Module.register_parameter
    moved = WeakIdKeyDictionary()  # a tied parameter is registered twice

    def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if isinstance(param, nn.Parameter) and param.device.type != "meta":
            if param not in moved:
                moved[param] = _meta_parameter(param)
            param = moved[param]
        original(self, name, param)

    nn.Module.register_parameter = register_parameter  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def _meta_parameter(param: nn.Parameter) -> nn.Parameter:
    return _parameter_like(param, torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device="meta"))


def _parameter_like(param: nn.Parameter, data: torch.Tensor) -> nn.Parameter:
    made = nn.Parameter(data, requires_grad=param.requires_grad)
    made.__dict__.update(param.__dict__)
    return made


def compute_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a tensor takes part in compute: floats in `dtype`, all else as it is."""
    return dtype if tensor.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64) else tensor.dtype


def to_fake(
    value: Any, mode: FakeTensorMode, dtype: torch.dtype | None = None, memo: dict[int, Any] | None = None
) -> Any:
    """A fake cpu tensor of the same shape and strides (floats in `dtype`), parameters as parameters; ties by `memo` survive."""
    memo = {} if memo is None else memo
    if id(value) in memo:
        return memo[id(value)]
    kind = value.dtype if dtype is None else compute_dtype(value, dtype)
    with mode, torch.no_grad():
        data = torch.empty_strided(value.shape, value.stride(), dtype=kind, device="cpu")
    made: torch.Tensor
    if isinstance(value, nn.Parameter):
        with mode:
            made = _parameter_like(value, data)
    else:
        made = data.requires_grad_(value.requires_grad) if value.requires_grad else data
    memo[id(value)] = made
    return made


@contextmanager
def fake_weights(model: nn.Module, mode: FakeTensorMode, dtype: torch.dtype) -> Iterator[None]:
    """Lend the model fake cpu parameters and buffers in the compute dtype; afterwards it is as it was, hooks and all."""
    memo: dict[int, Any] = {}
    before = [(module, dict(module.__dict__)) for module in model.modules()]
    try:
        for module, attributes in before:
            module.__dict__.update(
                {name: _fake_attribute(name, value, mode, dtype, memo) for name, value in attributes.items()}
            )
        yield
    finally:
        for module, attributes in before:
            module.__dict__.clear()
            module.__dict__.update(attributes)


_REGISTRIES = ("_parameters", "_buffers")


def _fake_attribute(name: str, value: Any, mode: FakeTensorMode, dtype: torch.dtype, memo: dict[int, Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return to_fake(value, mode, dtype, memo)
    if isinstance(value, dict) and (name in _REGISTRIES or name.startswith("_forward") or name == "_modules"):
        return type(value)(
            (key, to_fake(member, mode, dtype, memo) if isinstance(member, torch.Tensor) else member)
            for key, member in value.items()
        )
    if isinstance(value, (list, tuple)) and value and all(isinstance(member, torch.Tensor) for member in value):
        return type(value)([to_fake(member, mode, dtype, memo) for member in value])
    return value
