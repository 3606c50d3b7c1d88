"""A script that was written for GPUs and data workers, run on one cpu: used in the child of a capture alone, never undone."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn


def without_gpu() -> None:
    """A script that asks for its GPU gets the cpu, where the fake tensors are."""
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    torch.cuda.set_device = lambda *_: None
    torch.cuda.current_device = lambda: 0
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.device_count = lambda: 1

    tensor_to, module_to = torch.Tensor.to, nn.Module.to

    def placed(original: Any) -> Any:
        def to(self: Any, *args: Any, **kwargs: Any) -> Any:
            args = tuple(_cpu(value) for value in args if not (_is_place(value) and _is_meta(self)))
            kwargs = {key: _cpu(value) for key, value in kwargs.items() if not (key == "device" and _is_meta(self))}
            kwargs.pop("non_blocking", None)
            return original(self, *args, **kwargs) if args or kwargs else self

        return to

    torch.Tensor.to = placed(tensor_to)  # type: ignore[method-assign]
    nn.Module.to = placed(module_to)  # type: ignore[method-assign]
    for name in (
        "tensor",
        "zeros",
        "ones",
        "empty",
        "full",
        "rand",
        "randn",
        "randint",
        "arange",
        "zeros_like",
        "ones_like",
    ):
        setattr(torch, name, _on_cpu(getattr(torch, name)))

    start = torch.amp.autocast_mode.autocast.__init__

    def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        start(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    torch.amp.autocast_mode.autocast.__init__ = init  # type: ignore[method-assign]
    optimizer: Any = importlib.import_module("torch.optim.optimizer")
    optimizer._get_fused_kernels_supported_devices = lambda: ["cuda", "cpu", "meta"]


def _is_place(value: Any) -> bool:
    return (isinstance(value, (torch.device, int)) and not isinstance(value, bool)) or (isinstance(value, str))


def _is_meta(holder: Any) -> bool:
    """Whether it holds parameters on meta, which cannot be moved and need not be."""
    if isinstance(holder, torch.Tensor):
        return holder.is_meta
    return any(param.is_meta for param in holder.parameters())


def _cpu(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    if isinstance(value, str) and value.startswith("cuda"):
        return "cpu"
    return value


def _on_cpu(factory: Any) -> Any:
    def made(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = "cpu" if isinstance(kwargs["device"], int) else _cpu(kwargs["device"])
        return factory(*args, **kwargs)

    return made


def small_loaders() -> None:
    """Data loaders run in this process: one batch is all that is drawn."""
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
