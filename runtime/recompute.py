"""Activation recomputation: blocks forget what they computed and compute it again in backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from dsplan.runtime.sharding.blocks import find_blocks
from dsplan.schemas.choices import Recompute
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

KEPT = (
    "mm", "addmm", "convolution", "_grouped_mm",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)  # fmt: skip
"""Operators whose results "selective" keeps: products with weights, and fused attention. Norms, activation functions, dropout
and attention that writes its scores out (bmm, softmax) are cheap beside their bytes (Korthikanti et al. 2022,
arXiv:2205.05198, section 5)."""


def apply_recompute(model: nn.Module, policy: Recompute) -> int:
    """Wrap the forward of each block in place; the number of blocks wrapped. "none" does nothing.

    "full" keeps a block's inputs alone, "selective" also the results of KEPT. Non-reentrant checkpointing, so that frozen
    inputs and keyword arguments work.
    """
    if policy == "none":
        return 0
    blocks = find_blocks(model)
    options: dict[str, Any] = {"context_fn": selective_contexts} if policy == "selective" else {}
    for _, block in blocks:
        block.forward = _recomputed(block.forward, options)
    return len(blocks)


def _recomputed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    return wrapped


def selective_contexts() -> tuple[Any, Any]:
    """For checkpoint's context_fn: what forward keeps, and where the recomputation takes it from."""
    forward, backward = create_selective_checkpoint_contexts(_kept_or_again)  # type: ignore[no-untyped-call]
    return forward, backward


def _kept_or_again(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = isinstance(operator, torch._ops.OpOverload) and operator.namespace == "aten" and operator._opname in KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
