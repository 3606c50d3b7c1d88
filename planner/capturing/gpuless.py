"""Code that was written for GPUs and data workers, run on one cpu."""

from __future__ import annotations

import contextlib
import importlib
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator
from pathlib import Path
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
        (torch, "set_default_device", _kept_default(torch.set_default_device)),
        *((torch.cuda, name, answer) for name, answer in _CUDA.items()),
        *(
            (torch.cuda.nvtx, name, _answering(0))
            for name in ("range_push", "range_pop", "mark", "range_start", "range_end")
        ),
        (torch.cuda, "is_available", _to_the_user(torch.cuda.is_available)),
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


_MEMORY_BYTES = 80 * 2**30


def _answering(value: Any) -> Callable[..., Any]:
    """A function of its own each time: torch's compiler keeps a table of them."""

    def answer(*_: Any, **__: Any) -> Any:
        return value

    return answer


_PROPERTIES = types.SimpleNamespace(
    name="a GPU that is stood in for", total_memory=_MEMORY_BYTES, major=8, minor=0, multi_processor_count=108
)


class _Stream:
    """A stream or an event of which nothing waits."""

    def __init__(self, *_: Any, **__: Any):
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def elapsed_time(self, *_: Any) -> float:
        return 1.0

    def query(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: self


_CUDA: dict[str, Any] = {
    **{
        name: _answering(None)
        for name in (
            "set_device", "synchronize", "empty_cache", "ipc_collect", "manual_seed", "manual_seed_all", "seed", "seed_all",
            "reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached", "init", "set_rng_state",
            "set_rng_state_all", "set_per_process_memory_fraction",
        )
    },
    **{
        name: _answering(0)
        for name in (
            "current_device", "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved",
            "memory_cached", "max_memory_cached", "utilization",
        )
    },
    **{
        name: type(name, (_Stream,), {})
        for name in ("Stream", "Event", "stream", "current_stream", "default_stream", "device", "device_of")
    },
    "device_count": _answering(1),
    "is_initialized": _answering(False),
    "is_bf16_supported": _answering(True),
    "get_device_name": _answering(_PROPERTIES.name),
    "get_device_capability": _answering((_PROPERTIES.major, _PROPERTIES.minor)),
    "get_device_properties": _answering(_PROPERTIES),
    "mem_get_info": _answering((_MEMORY_BYTES, _MEMORY_BYTES)),
    "memory_stats": _answering({}),
    "memory_summary": _answering(""),
    "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
    "get_rng_state_all": lambda: [torch.zeros(16, dtype=torch.uint8)],
}  # fmt: skip
"""What torch.cuda answers: one GPU of the size and kind of an A100 (its data sheet), on which nothing is."""


def _to_the_user(original: Callable[[], bool]) -> Callable[[], bool]:
    """There is a GPU for the user's own files, so that they go on; libraries, which would use it, are told the truth."""

    def is_available() -> bool:
        return original() or not is_library(sys._getframe(1).f_code.co_filename)

    return is_available


def is_library(file: str) -> bool:
    """Whether a source file is Python's, an installed package's or our own."""
    path = Path(file)
    return (
        file.startswith("<")
        or any(part in ("site-packages", "dist-packages") for part in path.parts)
        or any(Path(folder) in path.parents for folder in _LIBRARIES)
    )


_LIBRARIES = (sysconfig.get_paths()["stdlib"], str(Path(__file__).resolve().parents[2] / "runtime"))


def _kept_default(original: Callable[..., None]) -> Callable[..., None]:
    def set_default_device(device: Any) -> None:
        if device is not None and not _is_gpu(device):
            original(device)

    return set_default_device


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
