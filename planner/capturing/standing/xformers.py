"""What xformers.ops offers a training script: memory-efficient attention with its masks, SwiGLU.

Source of names and arguments: xformers/ops/{fmha,swiglu_op}.py of 0.0.29.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from dsplan.planner.capturing.standing import functions
from dsplan.planner.capturing.standing.calls import told
from torch import nn

_PACKAGE = "xformers"


class AttentionBias:
    """A mask that the kernel computes: it holds no scores."""

    def __init__(self, *_: Any, **__: Any):
        pass

    def to(self, *_: Any, **__: Any) -> AttentionBias:
        return self

    def make_local_attention(self, *_: Any, **__: Any) -> AttentionBias:
        return self


class LowerTriangularMask(AttentionBias):
    pass


class LowerTriangularFromBottomRightMask(AttentionBias):
    pass


class LocalAttentionFromBottomRightMask(AttentionBias):
    pass


class LowerTriangularMaskWithTensorBias(AttentionBias):
    pass


class BlockDiagonalMask(AttentionBias):
    """Sequences of these lengths, one after another in one row."""

    def __init__(self, lengths: Sequence[int] = (), shapes: Sequence[Sequence[int]] | None = None):
        super().__init__()
        self.lengths = list(lengths)
        self._shapes = shapes

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Sequence[int], kv_seqlen: Sequence[int] | None = None, **_: Any
    ) -> BlockDiagonalMask:
        return cls(q_seqlen if kv_seqlen is None else kv_seqlen)

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[torch.Tensor]) -> tuple[BlockDiagonalMask, torch.Tensor]:
        lengths = [int(tensor.shape[1]) for tensor in tensors for _ in range(tensor.shape[0])]
        rows = [tensor.reshape([1, -1, *tensor.shape[2:]]) for tensor in tensors]
        return cls(lengths, [tensor.shape[:2] for tensor in tensors]), torch.cat(rows, dim=1)

    def split(self, tensor: Any) -> list[torch.Tensor]:
        shapes = self._shapes or [(1, length) for length in self.lengths]
        parts = torch.split(tensor, [int(batch * length) for batch, length in shapes], dim=1)
        return [part.view([*shape, *tensor.shape[2:]]) for part, shape in zip(parts, shapes, strict=True)]

    split_queries = split_kv = split

    def make_causal(self) -> BlockDiagonalMask:
        return BlockDiagonalCausalMask(self.lengths, self._shapes)

    make_causal_from_bottomright = make_causal


class BlockDiagonalCausalMask(BlockDiagonalMask):
    pass


class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    pass


class BlockDiagonalCausalLocalAttentionMask(BlockDiagonalMask):
    pass


@told(_PACKAGE)
def memory_efficient_attention(
    query: Any, key: Any, value: Any, attn_bias: Any = None, p: float = 0.0, scale: Any = None, **_: Any
) -> Any:
    """[batch, length, heads, dim]; without heads, or with groups of them, as xformers takes it."""
    if query.dim() == 3:
        parts = tuple(part.unsqueeze(2) for part in (query, key, value))
        return memory_efficient_attention(*parts, attn_bias, p).squeeze(2)
    if query.dim() == 5:
        parts = tuple(part.flatten(2, 3) for part in (query, key, value))
        return memory_efficient_attention(*parts, attn_bias, p).view([*query.shape[:-1], value.shape[-1]])
    if isinstance(attn_bias, BlockDiagonalMask):
        row = functions.attention(
            tuple(part.flatten(0, 1) for part in (query, key, value)), max(attn_bias.lengths), len(attn_bias.lengths)
        )
        return row.view([*query.shape[:-1], value.shape[-1]])
    return functions.attention((query, key, value))


@told(_PACKAGE)
def swiglu(x: Any, w1: Any, b1: Any, w2: Any, b2: Any, w3: Any, b3: Any, *_: Any, **__: Any) -> Any:
    """Keeps x and both products; the gated one is computed again in backward, as the fused operator does."""
    if functions.jit_tracing():
        return F.linear(F.silu(F.linear(x, w1, b1)) * F.linear(x, w2, b2), w3, b3)
    return _SwiGLU.apply(x, w1, b1, w2, b2, w3, b3)  # type: ignore[no-untyped-call]


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, w1: Any, b1: Any, w2: Any, b2: Any, w3: Any, b3: Any) -> torch.Tensor:
        gate, up = F.linear(x, w1, b1), F.linear(x, w2, b2)
        ctx.save_for_backward(x, w1, w2, w3, gate, up)
        ctx.biases = [bias is not None for bias in (b1, b2, b3)]
        return F.linear(torch.empty_like(gate), w3, b3)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, w1, w2, w3, _, _ = ctx.saved_tensors
        gradient = gradients[0].flatten(0, -2)
        rows = x.flatten(0, -2)
        hidden = gradient @ w3
        grad_gate, grad_up, inner = (torch.empty_like(hidden) for _ in range(3))
        del hidden
        dw3 = gradient.t() @ inner
        del inner
        dx = (grad_gate @ w1).addmm_(grad_up, w2)
        dw1, dw2 = grad_gate.t() @ rows, grad_up.t() @ rows
        biases = [
            made.sum(0) if has else None for made, has in zip((grad_gate, grad_up, gradient), ctx.biases, strict=True)
        ]
        return dx.view_as(x), dw1, biases[0], dw2, biases[1], dw3, biases[2]


class SwiGLU(nn.Module):
    """w1 and w2 packed into one linear unless asked otherwise, and w3."""

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        bias: bool = True,
        *,
        _pack_weights: bool = True,
    ):
        super().__init__()
        self.w12 = nn.Linear(in_features, 2 * hidden_features, bias=bias)
        self.w3 = nn.Linear(hidden_features, out_features or in_features, bias=bias)
        self.hidden_features, self.out_features, self.in_features = hidden_features, out_features, in_features

    def forward(self, x: Any) -> Any:
        w1, w2 = self.w12.weight.chunk(2)
        b1, b2 = self.w12.bias.chunk(2) if self.w12.bias is not None else (None, None)
        return swiglu(x, w1, b1, w2, b2, self.w3.weight, self.w3.bias)


_MASKS = {
    kind.__name__: kind
    for kind in (
        AttentionBias,
        LowerTriangularMask,
        LowerTriangularFromBottomRightMask,
        LocalAttentionFromBottomRightMask,
        LowerTriangularMaskWithTensorBias,
        BlockDiagonalMask,
        BlockDiagonalCausalMask,
        BlockDiagonalCausalFromBottomRightMask,
        BlockDiagonalCausalLocalAttentionMask,
    )
}
_OPS = {
    "memory_efficient_attention": memory_efficient_attention,
    "SwiGLU": SwiGLU,
    "swiglu": swiglu,
    "unbind": torch.unbind,
    "AttentionBias": AttentionBias,
    "AttentionMask": AttentionBias,
    "LowerTriangularMask": LowerTriangularMask,
    **{
        name: None
        for name in (
            "MemoryEfficientAttentionFlashAttentionOp",
            "MemoryEfficientAttentionCutlassOp",
            "MemoryEfficientAttentionCutlassFwdFlashBwOp",
        )
    },
}
MODULES: dict[str, dict[str, Any]] = {
    "xformers": {"__version__": "0.0.29"},
    "xformers.ops": _OPS,
    "xformers.ops.fmha": {"memory_efficient_attention": memory_efficient_attention, **_MASKS},
    "xformers.ops.fmha.attn_bias": _MASKS,
    "xformers.ops.swiglu_op": {"SwiGLU": SwiGLU, "swiglu": swiglu},
}
