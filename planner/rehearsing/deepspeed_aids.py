"""What real DeepSpeed needs to run on fake tensors, whatever its release: no file of it is changed, a few names are lent.

The GPU is `cpu:0` here and the host plain `cpu`: fake tensors keep the two apart as they would a GPU and its host, and autograd runs on both.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from dsplan.planner.tracing.kernels import normal_value
from torch import nn
from torch.overrides import TorchFunctionMode

GPU = torch.device("cpu", 0)
HOST = torch.device("cpu")
ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "LOCAL_SIZE": "1",  # else the CPU accelerator asks the program numactl
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
_AGREEMENTS = ("assert_ints_same_as_other_ranks", "assert_lst_len_same_as_other_ranks")


@contextlib.contextmanager
def deepspeed_on_fake_ranks(ranks: int) -> Iterator[Any]:
    """The imported `deepspeed`, this process being rank 0 of a fake process group of that size.

    Afterwards the group is gone and DeepSpeed has forgotten it, so that another size can follow in the same process.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with contextlib.ExitStack() as stack:
        stack.enter_context(_environment({**ENVIRONMENT, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        deepspeed = _imported()
        stack.enter_context(_replaced(sys, "excepthook", sys.excepthook))  # torch writes the rank into every traceback
        dist.distributed_c10d.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        stack.callback(dist.destroy_process_group)
        for owner, name, value in _lent(deepspeed):
            stack.enter_context(_replaced(owner, name, value))
        stack.enter_context(_forgotten())
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        yield deepspeed


def _imported() -> Any:
    """DeepSpeed with its log turned off; what it prints while it is imported goes to nobody."""
    with contextlib.redirect_stdout(sys.stderr):
        import deepspeed
    logging.getLogger("DeepSpeed").setLevel(logging.CRITICAL)
    return deepspeed


def _lent(deepspeed: Any) -> Iterator[tuple[Any, str, Any]]:
    """(owner, name, what stands there while DeepSpeed is rehearsed)."""
    accelerator = type(deepspeed.accelerator.get_accelerator())
    yield accelerator, "device_name", _device_name
    yield accelerator, "current_device_name", lambda self: str(GPU)
    yield accelerator, "is_fp16_supported", lambda self: True
    yield accelerator, "on_accelerator", lambda self, tensor: tensor.device == GPU
    for name, dtype in _TENSORS.items():
        yield accelerator, name, property(functools.partial(_tensors_on_gpu, dtype))
    yield nn.Module, "_apply", _apply_to_data
    for module in list(sys.modules.values()):  # a fake broadcast carries nothing, so nothing can be compared
        if getattr(module, "__name__", "").startswith("deepspeed."):
            for name in _AGREEMENTS:
                if name in vars(module):
                    yield module, name, _nothing
    yield torch, "compile", _not_compiled  # asked for where Muon is imported: seconds, and no byte of what we count
    comm = sys.modules.get("deepspeed.comm.torch")
    if hasattr(comm, "build_shm_op"):
        yield comm, "build_shm_op", _nothing
    # compiled operators take addresses: on fake tensors they have nothing to do
    from deepspeed.ops.op_builder import builder

    for kind in _descendants(builder.OpBuilder):
        if "load" in vars(kind):
            yield kind, "load", lambda self, verbose=True: _NoOperators()
    # torch's optimizers take a GPU's choice among their kernels
    from torch.utils import _foreach_utils

    devices = [*_foreach_utils._get_foreach_kernels_supported_devices(), "cpu"]
    yield sys.modules["torch.optim.optimizer"], "_get_foreach_kernels_supported_devices", lambda: devices


_TENSORS = {
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
}
"""Makers of tensors on the accelerator. Source: deepspeed/accelerator/abstract_accelerator.py."""


def _tensors_on_gpu(dtype: torch.dtype, accelerator: Any) -> Callable[..., torch.Tensor]:
    return functools.partial(torch.tensor, dtype=dtype, device=GPU)


_ASK_FOR_THE_TYPE = ("deepspeed.runtime.torch_autocast", "deepspeed.comm.torch", "deepspeed.runtime.zero.linear")
"""Modules that hand device_name() to what takes a device's type alone: autocast, device meshes."""


def _device_name(accelerator: Any, device_index: Any = None) -> str:
    asking = sys._getframe(1).f_globals.get("__name__")
    return HOST.type if device_index is None and asking in _ASK_FOR_THE_TYPE else str(GPU)


class Shortcuts(TorchFunctionMode):
    """Lets torch.tensor and its like, which make real tensors first, put them on the GPU as they were told.

    And where DeepSpeed cuts a tensor into one part per rank, parts of one size are one tensor: their values do not matter,
    and a thousand ranks would take minutes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._parts: weakref.WeakValueDictionary[tuple[int, int, int], torch.Tensor] = weakref.WeakValueDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _CUTS and _in_collectives():
            tensor = args[0]
            if func is torch.Tensor.narrow and len(args) == 4 and args[1] == 0:
                return self._part(tensor, args[3])
            if func is torch.Tensor.__getitem__ and isinstance(args[1], slice):
                start, stop, step = args[1].indices(len(tensor))
                if step == 1:
                    return self._part(tensor, max(0, stop - start))
            if func is torch.chunk and len(tensor) % args[1] == 0:
                return [self._part(tensor, len(tensor) // args[1])] * args[1]
            if func is torch.cat and len(args) == 1:
                return _joined(tensor, kwargs.get("out"))
        if func is torch.Tensor.__bool__ and getattr(args[0], "_dsplan_holds", False):
            return True
        result = func(*args, **kwargs)
        if func is torch.Tensor.gt and result.dim() == 0 and isinstance(args[1], (int, float)):
            # as of a finite norm, which is asserted to be above 0; a bare bool is an overflow flag, and false
            result._dsplan_holds = normal_value(args[0]) > args[1]
        if func in (torch.tensor, torch.as_tensor) and result.device == HOST:
            device = kwargs.get("device")
            if device is not None and torch.device(device) == GPU:
                return torch.empty(result.shape, dtype=result.dtype, device=GPU)  # a constant would not move
        return result

    def _part(self, tensor: torch.Tensor, length: int) -> torch.Tensor:
        key = (tensor.untyped_storage()._cdata, int(tensor.storage_offset()), length)
        part = self._parts.get(key)
        if part is None:
            part = self._parts[key] = tensor.narrow(0, 0, length)
        return part


def _joined(parts: Sequence[torch.Tensor], out: torch.Tensor | None) -> torch.Tensor:
    """torch.cat of flat parts, which need not be read."""
    if out is not None:
        return out
    return torch.empty(sum(part.numel() for part in parts), dtype=parts[0].dtype, device=parts[0].device)


_CUTS = (torch.Tensor.__getitem__, torch.Tensor.narrow, torch.chunk, torch.cat)
_GATHERS = ("_all_gather_dtype", "_allgather_params_coalesced", "_allgather_params", "wait")


def _in_collectives() -> bool:
    """Whether DeepSpeed's collectives ask, which cut by rank.

    Source: deepspeed/runtime/comm/coalesced_collectives.py, deepspeed/runtime/zero/partition_parameters.py.
    """
    frame: Any = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        name = code.co_filename
        if "/deepspeed/" in name:
            if name.endswith("partition_parameters.py"):
                return code.co_name in _GATHERS
            return bool(name.endswith("coalesced_collectives.py"))
        if "/torch/" not in name and "/dsplan/" not in name and "/planner/" not in name:
            return False
        frame = frame.f_back
    return False


class _NoOperators:
    """A compiled extension whose functions return at once."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: 0


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _not_compiled(model: Any = None, **options: Any) -> Any:
    return model if model is not None else lambda function: function


def _apply_to_data(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """nn.Module._apply by data: torch's own swaps tensors, which a fake one does not let it."""
    with torch.no_grad():
        for module in self.modules() if recurse else (self,):
            for param in module._parameters.values():
                if param is not None:
                    param.data = fn(param.data)
                    if param.grad is not None:
                        param.grad.data = fn(param.grad.data)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = fn(buffer)
    return self


def _descendants(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _descendants(child)


@contextlib.contextmanager
def _forgotten() -> Iterator[None]:
    """DeepSpeed keeps its process groups and some flags in its modules: afterwards they are as they were."""
    kept = {}
    for name, module in list(sys.modules.items()):
        if name in ("deepspeed.comm.comm", "deepspeed.utils.groups") or name.startswith("deepspeed.runtime.zero."):
            held = {key: value for key, value in vars(module).items() if not key.startswith("__")}
            kept[name] = {
                key: value.copy() if isinstance(value, (dict, list)) else value
                for key, value in held.items()
                if value is None or isinstance(value, (bool, int, dict, list))
            }
    try:
        yield
    finally:
        for name, held in kept.items():
            vars(sys.modules[name]).update(held)


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner).get(name, _ABSENT) if isinstance(owner, type) else getattr(owner, name, _ABSENT)
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name) if before is _ABSENT else setattr(owner, name, before)


_ABSENT = object()
