"""What a kernel refuses and tensors without values pass over in silence: positions beyond a table, inputs of a wrong dtype."""

from __future__ import annotations

import inspect
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from dsplan.schemas.problem import Problem
from torch import nn
from torch.overrides import TorchFunctionMode


class KernelChecks(TorchFunctionMode):
    """Problem with the user's line where an embedding is read at a torch.arange(...) that reaches beyond its rows, or a layer
    gets a tensor of a dtype that it does not take.

    path: the user's file. Enter it with the weights that forward reads.
    """

    def __init__(self, model: nn.Module, path: Path | None):
        super().__init__()
        self._path = path
        self._names = {id(param): name for name, param in model.named_parameters(remove_duplicate=False)}
        self._counted: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.embedding:
            self._check_rows(*args, **kwargs)
        elif func in _WITH_WEIGHT and len(args) > 1:
            self._check_dtype(args[0], args[1])
        made = func(*args, **kwargs)
        if func is torch.arange and made.numel():
            ends = [value for value in args if isinstance(value, int)]
            start, step = (ends[0] if len(ends) > 1 else 0), (ends[2] if len(ends) > 2 else 1)
            storage = made.untyped_storage()
            self._counted[storage._cdata] = weakref.ref(storage), start + step * (made.numel() - 1)
        return made

    def _check_rows(self, input: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any) -> None:
        name = self._names.get(id(weight), "an embedding")
        if input.dtype not in (torch.int32, torch.int64):
            raise Problem(
                f"{self._place()}{name} is read at a tensor of {dtype_name(input)}, but an embedding takes int64; feed "
                "tokens: torch.zeros(micro_batch, seq_len, dtype=torch.long)"
            )
        known = self._counted.get(input.untyped_storage()._cdata)
        if known is None or known[0]() is None or known[1] < weight.shape[0]:
            return
        raise Problem(
            f"{self._place()}position {known[1]} is read of {name}, which has {weight.shape[0]} rows; feed a shorter sequence "
            f"(--seq-len {weight.shape[0]}), or make the table longer"
        )

    def _check_dtype(self, input: Any, weight: Any) -> None:
        if input.is_floating_point() == weight.is_floating_point() and input.is_complex() == weight.is_complex():
            return
        name = self._names.get(id(weight), "a layer's weight")
        raise Problem(
            f"{self._place()}{name} of {dtype_name(weight)} gets an input of {dtype_name(input)}, which no kernel multiplies; feed "
            "floats: torch.zeros(...) without dtype="
        )

    def _place(self) -> str:
        """ "model.py:12: ", the innermost line of the user's file that runs."""
        if self._path is None:
            return ""
        frame = inspect.currentframe()
        while frame is not None:
            if Path(frame.f_code.co_filename).resolve() == self._path.resolve():
                return f"{self._path}:{frame.f_lineno}: "
            frame = frame.f_back
        return f"{self._path}: "


_WITH_WEIGHT = (F.linear, F.conv1d, F.conv2d, F.conv3d)


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
