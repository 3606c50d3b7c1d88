"""Kernels that only a GPU runs, for tensors without values: shapes, what is saved for backward, what backward makes and drops.

FLOPs are seen through the operators dsplan::attention, dsplan::linear_loss and dsplan::products, whose formulas are in
tracing/operators.py.
While torch.jit traces, which cannot look into an autograd function, the same shapes come from plain operators.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

_STREAMING_MULTIPROCESSORS = 132
"""Of an H100 (NVIDIA H100 datasheet): a partial gradient of norm weights per multiprocessor."""


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keys: int
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = query.shape[:-1]  # [batch, length, heads] or [tokens, heads]
    return query.new_zeros([*rows, value.shape[-1]]), query.new_zeros(
        [*rows[:-2], rows[-1], rows[-2]], dtype=torch.float32
    )


def _linear_loss(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return input.new_zeros([], dtype=torch.float32)


def _products(like: torch.Tensor, macs: int) -> None:
    return None


_LIBRARY: Any = torch.library.Library("dsplan", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("attention(Tensor query, Tensor key, Tensor value, int keys) -> (Tensor, Tensor)")
_LIBRARY.define("linear_loss(Tensor input, Tensor weight) -> Tensor")
_LIBRARY.define("products(Tensor like, int macs) -> ()")
for _device in ("CPU", "Meta"):
    _LIBRARY.impl("attention", _attend, _device)
    _LIBRARY.impl("linear_loss", _linear_loss, _device)
    _LIBRARY.impl("products", _products, _device)


def attention_backward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keys: int) -> None:
    """Counts scores again, and a product for each gradient of value, probabilities, query and key (Dao 2023, arXiv:2307.08691)."""
    torch.ops.dsplan.products(query, math.prod(query.shape[:-1]) * keys * (3 * query.shape[-1] + 2 * value.shape[-1]))


def jit_tracing() -> bool:
    """While FLOPs are counted."""
    return bool(torch._C._is_tracing())


def attention(tensors: tuple[torch.Tensor, ...], keys: int | None = None, sequences: int | None = None) -> torch.Tensor:
    """Flash attention over (q, k, v), (q, kv) or (qkv,): [batch, length, heads, dim], or [tokens, heads, dim] of `sequences`.

    keys: how many each query meets; None: all. Output and a float per head and query are kept beside the inputs.
    Source: flash-attention/csrc/flash_attn/flash_api.cpp (mha_fwd, mha_bwd and their varlen forms).
    """
    if keys is None:
        keys = int(tensors[-1].shape[1])
    if jit_tracing():
        return torch.ops.dsplan.attention(*_unpacked(tensors), keys)[0]  # type: ignore[no-any-return]
    return _Attention.apply(keys, sequences, *tensors)  # type: ignore[no-any-return, no-untyped-call]


def _unpacked(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """(q, k, v); packed ones lie along the third dim from the end."""
    return tensors if len(tensors) == 3 else (*tensors[:-1], *tensors[-1].unbind(-3))


def _rounded(length: int, to: int) -> int:
    return -(-length // to) * to


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, keys: int, sequences: int | None, *tensors: Any) -> torch.Tensor:
        parts = [part if part.stride(-1) == 1 else part.contiguous() for part in _unpacked(tensors)]
        dim = parts[0].shape[-1]
        if dim % 8:
            parts = [F.pad(part, [0, -part.shape[-1] % 8]) for part in parts]
        out, sums = torch.ops.dsplan.attention(*parts, keys)
        seed = torch.empty(2, dtype=torch.int64, device=out.device)
        ctx.save_for_backward(*parts, out, sums, seed)
        ctx.dim, ctx.sequences, ctx.shapes = dim, sequences, [tensor.shape for tensor in tensors]
        ctx.keys = keys
        return out[..., :dim] if dim % 8 else out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        query, key, value, _, _, _ = ctx.saved_tensors
        attention_backward(query, key, value, ctx.keys)
        gradient = gradients[0] if gradients[0].stride(-1) == 1 else gradients[0].contiguous()
        if ctx.dim % 8:
            gradient = F.pad(gradient, [0, -ctx.dim % 8])
        heads, dim = query.shape[-2:]
        grads = [query.new_empty([*shape[:-1], _rounded(shape[-1], 8)]) for shape in ctx.shapes]
        wide = _rounded(dim, 32) if dim <= 192 else 256
        if ctx.sequences is None:
            batch, length = query.shape[0], _rounded(query.shape[1], 128)
            shapes = [[batch, heads, length], [batch, length, heads, wide]]
        else:
            rows = query.shape[0] + 128 * ctx.sequences
            shapes = [[heads, rows], [rows, heads, wide]]
        temporary = [torch.empty(shape, dtype=torch.float32, device=query.device) for shape in shapes]
        if key.shape[-2] != heads:
            for part in (key, value):
                temporary.append(part.new_empty([*part.shape[:-2], heads, part.shape[-1]]))
        del temporary
        return (
            None,
            None,
            *(
                grad[..., : shape[-1]] if dim != ctx.dim else grad
                for grad, shape in zip(grads, ctx.shapes, strict=True)
            ),
        )


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, *, in_place: bool = False) -> torch.Tensor:
    """Keeps its input and a float per row. in_place: backward writes over the gradient that it is given."""
    return _norm(x, weight, None, False, in_place)


def layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    """Keeps its input, a mean and a deviation per row."""
    return _norm(x, weight, bias, True, False)


def _norm(x: torch.Tensor, weight: Any, bias: Any, centred: bool, in_place: bool) -> torch.Tensor:
    if jit_tracing():
        return x if weight is None else (x * weight).to(x.dtype)
    return _Norm.apply(x, weight, bias, centred, in_place)  # type: ignore[no-any-return, no-untyped-call]


class _Norm(torch.autograd.Function):
    """Source: liger_kernel/ops/{rms_norm,layer_norm}.py; apex/normalization/fused_layer_norm.py saves the same."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, centred: bool, in_place: bool) -> torch.Tensor:
        x = x.contiguous()
        rows = x.numel() // x.shape[-1]
        kept = [torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(1 + centred)]
        ctx.save_for_backward(x, weight, bias, *kept)
        ctx.in_place = in_place
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight, bias = ctx.saved_tensors[:3]
        gradient = gradients[0].contiguous()
        made: list[Any] = [gradient if ctx.in_place else torch.empty_like(gradient)]
        parts = [
            torch.empty(_STREAMING_MULTIPROCESSORS, x.shape[-1], dtype=torch.float32, device=x.device)
            if needed and part is not None
            else None
            for part, needed in zip((weight, bias), ctx.needs_input_grad[1:3], strict=True)
        ]
        for part, held in zip(parts, (weight, bias), strict=True):
            made.append(None if part is None else part.sum(dim=0).to(held.dtype).view(held.shape))
        return *made, None, None


def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, or the like, in one kernel: keeps both, and writes their gradients over them.

    Source: liger_kernel/ops/{swiglu,geglu}.py.
    """
    return gate * up if jit_tracing() else _Gated.apply(gate, up)  # type: ignore[no-untyped-call]


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Any, up: Any) -> torch.Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gate, up = ctx.saved_tensors
        return gate, up


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, in_place: bool) -> torch.Tensor:
    """Rotary embedding in one kernel: keeps cos and sin alone. In place: over x, and over the gradient."""
    return x * 1 if jit_tracing() else _Rotary.apply(x, cos, sin, in_place)  # type: ignore[no-untyped-call]


class _Rotary(torch.autograd.Function):
    """Source: liger_kernel/ops/rope.py (in place), flash_attn/layers/rotary.py."""

    @staticmethod
    def forward(ctx: Any, x: Any, cos: Any, sin: Any, in_place: bool) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.in_place = in_place
        return x.view_as(x) if in_place else torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gradient = gradients[0].contiguous() if ctx.in_place else torch.empty_like(gradients[0])
        return gradient, None, None, None


def cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, *, reduction: str = "mean", in_place: bool = True
) -> torch.Tensor:
    """Loss over rows of logits in one kernel. in_place: the gradient is written over the logits.

    Source: liger_kernel/ops/cross_entropy.py (in place), flash_attn/ops/triton/cross_entropy.py (a copy unless asked).
    """
    if jit_tracing():
        losses = logits.float().sum(-1)
        return losses if reduction == "none" else losses.sum()
    return _CrossEntropy.apply(logits, target, reduction, in_place)  # type: ignore[no-any-return, no-untyped-call]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Any, target: Any, reduction: str, in_place: bool) -> torch.Tensor:
        losses = torch.empty(logits.shape[0], dtype=logits.dtype if in_place else torch.float32, device=logits.device)
        if in_place:
            ctx.save_for_backward(logits.detach().contiguous())
        else:
            ctx.save_for_backward(logits, torch.empty_like(losses), target)
        ctx.in_place = in_place
        return losses if reduction == "none" else losses.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        logits = ctx.saved_tensors[0]
        return logits if ctx.in_place else torch.empty_like(logits), None, None, None


def linear_cross_entropy(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    reduction: str = "mean",
    accumulate_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The output layer and its loss, a chunk of rows after another; all gradients are made in forward. input: [rows, width].

    Source: liger_kernel/ops/fused_linear_cross_entropy.py of 0.8.
    """
    if jit_tracing():
        loss = torch.ops.dsplan.linear_loss(input, weight)
        return loss.expand(input.shape[0]) if reduction == "none" else loss  # type: ignore[no-any-return]
    return _LinearCrossEntropy.apply(input, weight, target, bias, reduction, accumulate_dtype)  # type: ignore[no-any-return, no-untyped-call]


def chunk_rows(rows: int, width: int, classes: int) -> int:
    """Rows whose logits take as much as the input: a power of two near rows x width / classes."""
    parts = -(-classes // width)
    return min(rows, 1 << (-(-rows // parts) - 1).bit_length())


class _LinearCrossEntropy(torch.autograd.Function):
    """Without a reduction the gradients wait for backward, which computes the logits again."""

    @staticmethod
    def forward(
        ctx: Any, input: Any, weight: Any, target: Any, bias: Any, reduction: str, accumulate: torch.dtype | None
    ) -> torch.Tensor:
        losses = torch.empty(input.shape[0], dtype=torch.float32, device=input.device)
        ctx.later = reduction == "none"
        ctx.accumulate = accumulate
        wanted = (False, False, False) if ctx.later else _wanted(ctx)
        grads = _linear_loss_chunks(input, weight, bias, wanted, accumulate)
        if ctx.later:
            ctx.save_for_backward(input, weight, target, bias)
            return losses
        ctx.save_for_backward(*(grad.detach() if grad is not None else None for grad in grads))
        ctx.macs = input.numel() * weight.shape[0] * sum(wanted[:2])
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if ctx.later:
            input, weight, _, bias = ctx.saved_tensors
            grads = _linear_loss_chunks(input, weight, bias, _wanted(ctx), ctx.accumulate)
            torch.ops.dsplan.products(input, input.numel() * weight.shape[0] * sum(_wanted(ctx)[:2]))
        else:  # made in forward already, counted as the backward that they are
            grads = ctx.saved_tensors
            torch.ops.dsplan.products(gradients[0], ctx.macs)
        return grads[0], grads[1], None, grads[2], None, None


def _wanted(ctx: Any) -> tuple[bool, bool, bool]:
    """Of input, weight, bias."""
    input, weight, _, bias = ctx.needs_input_grad[:4]
    return input, input and weight, input and bias


def _linear_loss_chunks(
    input: Any, weight: Any, bias: Any, wanted: tuple[bool, bool, bool], accumulate: torch.dtype | None
) -> list[Any]:
    """The gradients that are wanted; the logits of one chunk at a time are made on the way."""
    rows, width = input.shape
    grads: list[Any] = [torch.empty_like(input)]
    for held, needed in zip((weight, bias), wanted[1:], strict=True):
        grads.append(torch.empty_like(held, dtype=accumulate or held.dtype) if needed and held is not None else None)
    mask = torch.empty(rows, dtype=torch.bool, device=input.device)
    logits = input.new_empty(chunk_rows(rows, width, weight.shape[0]), weight.shape[0])
    torch.ops.dsplan.linear_loss(input, weight)
    del logits, mask
    return [
        grads[0],
        *(
            grad.to(held.dtype) if grad is not None else None
            for grad, held in zip(grads[1:], (weight, bias), strict=True)
        ),
    ]
