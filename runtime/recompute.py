"""Activation recomputation: blocks forget what they computed and compute it again in backward."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from dsplan.runtime.sharding.blocks import find_blocks
from dsplan.schemas.choices import Recompute
from dsplan.schemas.problem import Problem
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


def apply_recompute(model: nn.Module, policy: Recompute, *, inputs_on_host: bool = False) -> int:
    """Wrap the forward of each block in place; the number of blocks wrapped. "none" does nothing.

    "full" keeps a block's inputs alone, "selective" also the results of KEPT. Non-reentrant checkpointing, so that frozen
    inputs and keyword arguments work. A block that the model checkpoints itself is not computed a third time.
    inputs_on_host: kept inputs wait in host memory. Blocks that are computed again fill no cache of keys and values.
    """
    if policy == "none":
        return 0
    blocks = find_blocks(model)
    options: dict[str, Any] = {"context_fn": selective_contexts} if policy == "selective" else {}
    for _, block in blocks:
        block.forward = _recomputed(block.forward, options, inputs_on_host)
    return len(blocks)


def _recomputed(forward: Callable[..., Any], options: dict[str, Any], inputs_on_host: bool) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and is_checkpointed_already():
            return forward(*args, **kwargs)
        args = tuple(_without_cache(given) for given in args)
        kwargs = {name: _without_cache(given) for name, given in kwargs.items()}
        if kwargs.get("use_cache") is True:
            kwargs["use_cache"] = False
        with on_host() if inputs_on_host else contextlib.nullcontext():
            return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    return wrapped


def _without_cache(given: Any) -> Any:
    """None for a cache of keys and values, which the second computation would fill a second time. Problem for a filled one.

    transformers' models make one in training too, unless use_cache is off, and drop it as here under their own
    checkpointing. Source: transformers/modeling_layers.py, GradientCheckpointingLayer.
    """
    if not (hasattr(given, "get_seq_length") and hasattr(given, "update")):
        return given
    if int(given.get_seq_length()) > 0:
        raise Problem(
            "a block that is computed again in backward was given a cache of keys and values that is filled already "
            '(past_key_values), and would fill it twice; train without it, or set {"dsplan": {"recompute": "none"}}'
        )
    return None


def is_checkpointed_already() -> bool:
    """Whether what runs now keeps nothing for backward anyway: without gradients, as in a reentrant checkpoint; in backward,
    where it is computed again; or in a checkpoint of the model's own."""
    if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
        return True
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == checkpoint.__module__


def on_host() -> contextlib.AbstractContextManager[Any]:
    """What autograd keeps of the operators called inside waits in host memory; of a checkpoint that is its inputs alone."""
    return torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())


def selective_contexts() -> tuple[Any, Any]:
    """For checkpoint's context_fn: what forward keeps, and where the recomputation takes it from."""
    forward, backward = create_selective_checkpoint_contexts(_kept_or_again)  # type: ignore[no-untyped-call]
    return forward, backward


def _kept_or_again(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = isinstance(operator, torch._ops.OpOverload) and operator.namespace == "aten" and operator._opname in KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
