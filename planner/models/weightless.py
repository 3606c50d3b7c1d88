"""Modules without weights: built on device meta, and lent fake weights for as long as they are traced."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from dsplan.planner.capturing.gpuless import GpuAs
from dsplan.planner.compiler_put_off import compiler_put_off
from dsplan.schemas.units import size
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""The compute dtype of each precision."""


class Inputs(NamedTuple):
    """What a model is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def feed(self, model: Callable[..., Any]) -> Any:
        return model(*self.args, **self.kwargs)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, torch.Tensor)]


def tensors_of(output: Any) -> list[torch.Tensor]:
    """The tensors of what a model returns, also those that dataclasses hold."""
    leaves = []
    for leaf in tree_leaves(output):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            leaves += tensors_of([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
        elif isinstance(leaf, torch.Tensor):
            leaves.append(leaf)
    return leaves


def build_weightless(build: Callable[[], Any]) -> Any:
    """What `build()` returns, made on device meta; where a model reads values while it is built, only its parameters are.

    The second way costs one parameter's memory at a time. Whatever it raises is the caller's to explain.
    """
    try:
        with compiler_put_off(), HostMemory(), torch.device("meta"), GpuAs("meta"):
            return build()
    except MemoryError:
        raise
    except Exception:
        with HostMemory(), parameters_on_meta():
            return build()


class HostMemory(TorchFunctionMode):
    """MemoryError before a tensor is made on the host that its free memory cannot hold; the kernel would end the process."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FACTORIES and torch.device(kwargs.get("device") or "cpu").type == "cpu":
            asked = {key: value for key, value in kwargs.items() if key not in ("generator", "pin_memory", "out")}
            wanted = func(*args, **{**asked, "device": "meta"})
            free = _free_bytes()
            if free is not None and wanted.nbytes > free:
                raise MemoryError(f"{size(wanted.nbytes)} asked for on the cpu, {size(free)} free")
        return func(*args, **kwargs)


_FACTORIES = (torch.zeros, torch.ones, torch.full, torch.rand, torch.randn)
"""What fills the memory that it takes."""


def _free_bytes() -> int | None:
    """Of the host; None where the system does not say. Source: proc(5), /proc/meminfo."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return None


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Each parameter goes to device meta as a module takes it in, so that ten billion of them cost nothing."""
    original = nn.Module.register_parameter
    moved = WeakIdKeyDictionary()  # a tied parameter is registered twice

    def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if isinstance(param, nn.Parameter) and not is_lazy(param) and param.device.type != "meta":
            if param not in moved:
                moved[param] = _meta_parameter(param)
            param = moved[param]
        original(self, name, param)

    nn.Module.register_parameter = register_parameter  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def lazy_names(module: nn.Module) -> list[str]:
    """Parameters and buffers whose sizes are not known before a batch has run through the model."""
    held = [*module.named_parameters(), *module.named_buffers()]
    return [name for name, tensor in held if is_lazy(tensor)]


def _meta_parameter(param: nn.Parameter) -> nn.Parameter:
    return _parameter_like(param, torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device="meta"))


def _parameter_like(param: nn.Parameter, data: torch.Tensor) -> nn.Parameter:
    made = nn.Parameter(data, requires_grad=param.requires_grad)
    made.__dict__.update(param.__dict__)
    return made


def compute_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a tensor takes part in compute: floats in `dtype`, all else as it is."""
    return dtype if tensor.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64) else tensor.dtype


def is_quantized(param: torch.Tensor) -> bool:
    """Whether its bytes are packed elements, of another number and dtype than the weight that it holds."""
    return hasattr(param, "quantized_shape")


def logical_shape(param: torch.Tensor) -> tuple[int, ...]:
    """Of the weight that the parameter holds."""
    shape: tuple[int, ...] = getattr(param, "quantized_shape", tuple(param.shape))
    return shape


Stand = Callable[[torch.Tensor], torch.Tensor]
"""Makes a tensor that stands for another: same shape and strides, no values."""


def fakes(mode: FakeTensorMode, dtype: torch.dtype, device: str = "cpu") -> Stand:
    """Fake tensors on that device, floats in `dtype`."""

    def stand(tensor: torch.Tensor) -> torch.Tensor:
        with mode, torch.no_grad():
            return _stand(tensor, device, dtype)

    return stand


def metas(dtype: torch.dtype) -> Stand:
    """Meta tensors, floats in `dtype`."""
    return lambda tensor: _stand(tensor, "meta", dtype)


def _stand(tensor: torch.Tensor, device: str, dtype: torch.dtype) -> torch.Tensor:
    kind = compute_dtype(tensor, dtype)
    data = torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind, device=device)
    if isinstance(tensor, nn.Parameter):
        return _parameter_like(tensor, data)
    return data.requires_grad_(tensor.requires_grad) if tensor.is_leaf else data


def stand_in(batch: Any, stand: Stand) -> Any:
    """The batch with each tensor by what stands for it; one that is fed twice (as tokens and labels) stays one."""
    made: dict[int, torch.Tensor] = {}

    def once(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in made:
            made[id(leaf)] = stand(leaf)
        return made[id(leaf)]

    return tree_map(once, batch)


@contextmanager
def lent_weights(model: nn.Module, stand: Stand) -> Iterator[None]:
    """Lend the model other parameters and buffers, ties kept; afterwards it is as it was, hooks and all.

    By replacing what the modules hold: `.to()` cannot swap a parameter for a fake one.
    """
    memo: dict[int, Any] = {}

    def once(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in memo:
            memo[id(value)] = stand(value)
        return memo[id(value)]

    before = [(module, dict(module.__dict__)) for module in model.modules()]
    try:
        for module, attributes in before:
            module.__dict__.update({name: _lent(value, once) for name, value in attributes.items()})
        yield
    finally:
        for module, attributes in before:
            module.__dict__.clear()
            module.__dict__.update(attributes)


def _lent(value: Any, once: Callable[[Any], Any]) -> Any:
    """A module's attribute: a tensor, or the containers that hold tensors (copied, so that what is added is undone)."""
    if isinstance(value, torch.Tensor):
        return once(value)
    if type(value) in (dict, OrderedDict):
        return type(value)((key, once(member)) for key, member in value.items())
    if type(value) in (list, tuple) and any(isinstance(member, torch.Tensor) for member in value):
        return type(value)(once(member) for member in value)
    return value
