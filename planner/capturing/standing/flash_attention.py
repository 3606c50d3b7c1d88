"""What flash_attn 2 offers a training script: attention in all its forms, padding, rotary embedding, norms, the loss.

Source of names and arguments: flash-attention/flash_attn/*.py of 2.8.
"""

from __future__ import annotations

from typing import Any

import torch
from dsplan.planner.capturing.standing import functions
from dsplan.planner.capturing.standing.calls import told
from torch import nn

_PACKAGE = "flash_attn"
_FULL = "its FLOPs as if each query met max_seqlen keys"
_PADDED = "all tokens count as there, padding too"


def _answer(out: torch.Tensor, options: dict[str, Any]) -> Any:
    """With return_attn_probs: (out, sums, probabilities), of which nothing but out has a meaning."""
    if not options.get("return_attn_probs"):
        return out
    return out, out.new_empty(0, dtype=torch.float32), out.new_empty(0)


@told(_PACKAGE)
def flash_attn_func(q: Any, k: Any, v: Any, *_: Any, **options: Any) -> Any:
    return _answer(functions.attention((q, k, v)), options)


@told(_PACKAGE)
def flash_attn_qkvpacked_func(qkv: Any, *_: Any, **options: Any) -> Any:
    return _answer(functions.attention((qkv,)), options)


@told(_PACKAGE)
def flash_attn_kvpacked_func(q: Any, kv: Any, *_: Any, **options: Any) -> Any:
    return _answer(functions.attention((q, kv)), options)


@told(_PACKAGE, _FULL)
def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    *_: Any,
    **options: Any,
) -> Any:
    return _answer(_ragged((q, k, v), cu_seqlens_q, max_seqlen_k), options)


@told(_PACKAGE, _FULL)
def flash_attn_varlen_qkvpacked_func(qkv: Any, cu_seqlens: Any, max_seqlen: Any, *_: Any, **options: Any) -> Any:
    return _answer(_ragged((qkv,), cu_seqlens, max_seqlen), options)


@told(_PACKAGE, _FULL)
def flash_attn_varlen_kvpacked_func(
    q: Any, kv: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any, *_: Any, **options: Any
) -> Any:
    return _answer(_ragged((q, kv), cu_seqlens_q, max_seqlen_k), options)


def _ragged(tensors: tuple[torch.Tensor, ...], starts: torch.Tensor, longest: Any) -> torch.Tensor:
    """A longest sequence of one or none was read off a tensor without values: the mean stands for it."""
    sequences = int(starts.shape[0]) - 1
    known = isinstance(longest, int) and longest > 1
    keys = longest if known else -(-int(tensors[-1].shape[0]) // max(sequences, 1))
    return functions.attention(tensors, keys, sequences)


@told(_PACKAGE)
def flash_attn_with_kvcache(q: Any, k_cache: Any, v_cache: Any, *_: Any, **__: Any) -> Any:
    return functions.attention((q, k_cache, v_cache))


@told(_PACKAGE, _PADDED)
def unpad_input(hidden_states: Any, attention_mask: Any, unused_mask: Any = None) -> tuple[Any, ...]:
    """(tokens, their indices, starts, longest, tokens of each sequence)."""
    batch, length = attention_mask.shape
    indices = torch.arange(batch * length, device=hidden_states.device)
    starts = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=hidden_states.device)
    used = attention_mask.sum(dim=-1, dtype=torch.int32)
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, starts, length, used


@told(_PACKAGE, _PADDED)
def pad_input(hidden_states: Any, indices: Any, batch: int, seqlen: int) -> Any:
    padded = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return padded.index_put((indices,), hidden_states).view(batch, seqlen, *hidden_states.shape[1:])


def index_first_axis(x: Any, indices: Any) -> Any:
    return x.index_select(0, indices)


@told(_PACKAGE)
def apply_rotary_emb(
    x: Any, cos: Any, sin: Any, interleaved: bool = False, inplace: bool = False, *_: Any, **__: Any
) -> Any:
    return functions.rotary(x, cos, sin, in_place=inplace)


class RotaryEmbedding(nn.Module):
    """Over qkv packed, or over (q, kv)."""

    def __init__(
        self, dim: int, base: float = 10000.0, interleaved: bool = False, scale_base: Any = None, *_: Any, **__: Any
    ):
        super().__init__()
        self.dim = dim
        self.register_buffer("inv_freq", 1.0 / (base ** (torch.arange(0, dim, 2) / dim)), persistent=False)

    def forward(
        self, qkv: Any, kv: Any = None, seqlen_offset: Any = 0, cu_seqlens: Any = None, max_seqlen: Any = None
    ) -> Any:
        length = max_seqlen if isinstance(max_seqlen, int) and max_seqlen > 1 else qkv.shape[1]
        angles = qkv.new_empty(length, self.dim // 2)
        turned = apply_rotary_emb(qkv, angles, torch.empty_like(angles), inplace=True)
        return turned if kv is None else (turned, apply_rotary_emb(kv, angles, angles, inplace=True))


@told(_PACKAGE)
def rms_norm(x: Any, weight: Any, epsilon: float = 1e-6) -> Any:
    return functions.rms_norm(x, weight)


@told(_PACKAGE)
def rms_norm_fn(
    x: Any, weight: Any, bias: Any = None, residual: Any = None, *_: Any, prenorm: bool = False, **__: Any
) -> Any:
    added = x if residual is None else x + residual
    out = functions.rms_norm(added, weight)
    return (out, added) if prenorm else out


@told(_PACKAGE)
def layer_norm_fn(
    x: Any,
    weight: Any,
    bias: Any = None,
    residual: Any = None,
    *_: Any,
    prenorm: bool = False,
    is_rms_norm: bool = False,
    **__: Any,
) -> Any:
    added = x if residual is None else x + residual
    out = functions.rms_norm(added, weight) if is_rms_norm else functions.layer_norm(added, weight, bias)
    return (out, added) if prenorm else out


class RMSNorm(nn.Module):
    def __init__(self, hidden_size: int, eps: float = 1e-5, *_: Any, device: Any = None, dtype: Any = None, **__: Any):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def forward(self, x: Any, residual: Any = None, prenorm: bool = False, *_: Any, **__: Any) -> Any:
        return rms_norm_fn(x, self.weight, residual=residual, prenorm=prenorm)


class CrossEntropyLoss(nn.Module):
    """A copy of the logits' size in backward, unless inplace_backward."""

    def __init__(
        self, ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0, logit_scale: float = 1.0,
        lse_square_scale: float = 0.0, inplace_backward: bool = False, *_: Any, **__: Any,
    ):  # fmt: skip
        super().__init__()
        self.reduction = reduction
        self.inplace_backward = inplace_backward

    def forward(self, input: Any, target: Any, *_: Any) -> Any:
        return cross_entropy_loss(input, target, self.reduction, self.inplace_backward)


@told(_PACKAGE)
def cross_entropy_loss(input: Any, target: Any, reduction: str, inplace_backward: bool) -> Any:
    return functions.cross_entropy(input, target, reduction=reduction, in_place=inplace_backward)


_ATTENTION = {
    function.__name__: function
    for function in (
        flash_attn_func,
        flash_attn_qkvpacked_func,
        flash_attn_kvpacked_func,
        flash_attn_varlen_func,
        flash_attn_varlen_qkvpacked_func,
        flash_attn_varlen_kvpacked_func,
        flash_attn_with_kvcache,
    )
}
MODULES: dict[str, dict[str, Any]] = {
    "flash_attn": {"__version__": "2.8.3", **_ATTENTION},
    "flash_attn.flash_attn_interface": _ATTENTION,
    "flash_attn.bert_padding": {
        "unpad_input": unpad_input,
        "pad_input": pad_input,
        "index_first_axis": index_first_axis,
    },
    "flash_attn.layers": {},
    "flash_attn.layers.rotary": {
        "apply_rotary_emb": apply_rotary_emb,
        "apply_rotary_emb_func": apply_rotary_emb,
        "RotaryEmbedding": RotaryEmbedding,
    },
    "flash_attn.ops": {},
    "flash_attn.ops.rms_norm": {"rms_norm": rms_norm, "RMSNorm": RMSNorm},
    "flash_attn.ops.triton": {},
    "flash_attn.ops.triton.layer_norm": {
        "rms_norm_fn": rms_norm_fn,
        "layer_norm_fn": layer_norm_fn,
        "RMSNorm": RMSNorm,
    },
    "flash_attn.ops.triton.rotary": {"apply_rotary": apply_rotary_emb},
    "flash_attn.losses": {},
    "flash_attn.losses.cross_entropy": {"CrossEntropyLoss": CrossEntropyLoss},
}
