"""Code that was written for GPUs and data workers, run on one cpu."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


@contextlib.contextmanager
def without_gpu() -> Iterator[None]:
    """Code that asks for its GPU gets the device where the other tensors are: the default one (cpu, or meta)."""
    start = torch.amp.autocast_mode.autocast.__init__

    def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        start(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    optimizer: Any = importlib.import_module("torch.optim.optimizer")
    instead: list[tuple[Any, str, Any]] = [
        (nn.Module, "cuda", lambda self, *_, **__: self),
        (nn.Module, "to", _placed(nn.Module.to)),
        (torch.cuda, "set_device", lambda *_: None),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "synchronize", lambda *_: None),
        (torch.cuda, "device_count", lambda: 1),
        (torch.amp.autocast_mode.autocast, "__init__", init),
        (optimizer, "_get_fused_kernels_supported_devices", lambda: ["cuda", "cpu", "meta"]),
    ]
    before = [(holder, name, getattr(holder, name)) for holder, name, _ in instead]
    for holder, name, value in instead:
        setattr(holder, name, value)
    try:
        with GpuAs("meta" if torch.get_default_device().type == "meta" else "cpu"):
            yield
    finally:
        for holder, name, value in before:
            setattr(holder, name, value)


class GpuAs(TorchFunctionMode):
    """Tensors that would be made on a GPU are made on this device, and those that would move there stay."""

    def __init__(self, device: str):
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory) or (func is torch.Tensor.cpu and args[0].is_meta):
            return args[0]
        if func is torch.Tensor.to:
            return _moved(func, args[0].is_meta, *args, **kwargs)
        if kwargs and _is_gpu(kwargs.get("device")):
            kwargs = {**kwargs, "device": self._device}
        if kwargs and "pin_memory" in kwargs:
            kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
        return func(*args, **kwargs)


def _placed(original: Callable[..., Any]) -> Callable[..., Any]:
    def to(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _moved(original, any(param.is_meta for param in self.parameters()), self, *args, **kwargs)

    return to


def _moved(original: Callable[..., Any], on_meta: bool, holder: Any, *args: Any, **kwargs: Any) -> Any:
    """`.to` without a GPU; what lies on meta cannot be moved and need not be."""

    def stays(value: Any) -> bool:
        return _is_gpu(value) or (on_meta and isinstance(value, (torch.device, str)))

    args = tuple(value for value in args if not stays(value))
    kwargs = {key: value for key, value in kwargs.items() if not (key == "device" and stays(value))}
    kwargs.pop("non_blocking", None)
    return original(holder, *args, **kwargs) if args or kwargs else holder


def _is_gpu(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    if isinstance(value, str):
        return value.startswith("cuda")
    return isinstance(value, int) and not isinstance(value, bool)  # an index of one


def small_loaders() -> None:
    """Data loaders run in this process, from now on: one batch is all that is drawn."""
    from torch.utils.data import DataLoader

    start = DataLoader.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in (
            "num_workers",
            "prefetch_factor",
            "persistent_workers",
            "pin_memory",
            "timeout",
            "worker_init_fn",
            "multiprocessing_context",
        ):
            kwargs.pop(name, None)
        start(self, *args, **kwargs)

    DataLoader.__init__ = init  # type: ignore[method-assign]
