"""The kernels that a GPU would choose, where the choice on cpu holds other bytes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from dsplan.planner.capturing.standing.functions import attention_backward
from dsplan.planner.tracing.choices import KnownValues
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class GpuKernels(TorchFunctionMode):
    """Dropout keeps a one-byte mask; attention with dropout keeps no scores; RMS norm is one kernel that keeps its input.

    Only shapes are right: for tensors without values. Source: aten/src/ATen/native/Dropout.cpp, layer_norm.cpp (rms_norm),
    transformers/cuda/attention.cu (flash and memory-efficient).
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            kwargs.pop("dropout_p", None)
            if _only_on_a_gpu(*args, **kwargs):
                return _FusedAttention.apply(*args[:3])  # type: ignore[no-untyped-call]
        if func in (F.rms_norm, torch.rms_norm):
            return _rms_norm(*args, **kwargs)
        return func(*args, **kwargs)


def _only_on_a_gpu(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> bool:
    """Values wider or narrower than keys: memory-efficient on a GPU, where the cpu writes the scores out.

    Source: transformers/cuda/sdp_utils.cpp (check_head_dim_size_mem_efficient); transformers/sdp_utils_cpp.cpp, whose
    flash attention takes one head dim alone.
    """
    same_heads = query.dim() == key.dim() == value.dim() == 4 and query.shape[:2] == key.shape[:2] == value.shape[:2]
    return same_heads and query.shape[-1] != value.shape[-1]


class _FusedAttention(torch.autograd.Function):
    """Saves query, key, value, its output and an fp32 log-sum-exp per query and head; scores are never written.

    The output lies as [batch, length, heads, dim]. Source: transformers/cuda/attention.cu (_efficient_attention_forward).
    """

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        batch, heads, length, _ = query.shape
        shape = (batch, length, heads, value.shape[-1])
        output = torch.empty(shape, dtype=query.dtype, device=query.device).transpose(1, 2)
        sums = torch.empty((batch, heads, length), dtype=torch.float32, device=query.device)
        ctx.save_for_backward(query, key, value, output, sums)
        torch.ops.dsplan.products(
            query, query.numel() // query.shape[-1] * key.shape[-2] * (query.shape[-1] + value.shape[-1])
        )
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        query, key, value = ctx.saved_tensors[:3]
        attention_backward(query, key, value, key.shape[-2])
        held = zip(ctx.saved_tensors[:3], ctx.needs_input_grad, strict=True)
        return tuple(torch.empty_like(tensor) if wanted else None for tensor, wanted in held)


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    if inplace or not training or p in (0, 1):
        return F.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


def _rms_norm(input: torch.Tensor, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> torch.Tensor:
    return _FusedRmsNorm.apply(input, weight, len(normalized_shape))  # type: ignore[no-any-return, no-untyped-call]


class _FusedRmsNorm(torch.autograd.Function):
    """Saves input, weight and an fp32 reciprocal root per row."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor | None, dims: int) -> torch.Tensor:
        rows = [*input.shape[: input.dim() - dims], *([1] * dims)]
        ctx.save_for_backward(input, weight, torch.empty(rows, dtype=torch.float32, device=input.device))
        return torch.empty_like(input)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, Any, None]:
        input, weight, _ = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return (
            torch.empty_like(input) if wanted[0] else None,
            torch.empty_like(weight) if weight is not None and wanted[1] else None,
            None,
        )


OF_ENGINES = 0.5
"""What an engine reads: a finite norm, a step, a product of decays, by whose distance to 1 NAdam divides."""


def normal_value(tensor: torch.Tensor, number: float = 1.0) -> bool | int | float:
    """What `.item()` says, since fake tensors hold no values: finite, no overflow."""
    if tensor.dtype is torch.bool:
        return False
    return number if tensor.is_floating_point() else 0


class NormalValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers `.item()` of tensors without values with a normal step's value: a finite norm, no overflow, balanced experts."""

    def __init__(self, number: float = 1.0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._number = number
        self._known = KnownValues()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled under it, and the wrapper costs more than the answer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # three of four calls
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local operations come back here
        if func is torch.ops.aten._local_scalar_dense.default and (args[0].is_meta or isinstance(args[0], FakeTensor)):
            value = None if args[0].is_meta else self._known.item(args[0])
            return normal_value(args[0], self._number) if value is None else value
        return self._known.call(func, *args, **(kwargs or {}))


def grouped_mm(left: torch.Tensor, right: torch.Tensor, offs: Any = None, *_: Any, **__: Any) -> torch.Tensor:
    """What torch._grouped_mm gives, by shape alone. Rows of 2-d operands are told apart by offs, one group each."""
    shape = [left.shape[-2], right.shape[-1]]
    if left.dim() == right.dim():
        shape.insert(0, offs.shape[0] if left.dim() == 2 else left.shape[0])
    return torch.empty(shape, dtype=left.dtype, device=left.device)
