"""Activation recomputation: blocks forget what they computed and compute it again in backward."""

from __future__ import annotations

import functools
from typing import Any

from dsplan.runtime.blocks import find_blocks
from dsplan.schemas.choices import Recompute
from dsplan.schemas.problem import Problem
from torch import nn
from torch.utils.checkpoint import checkpoint


def apply_recompute(model: nn.Module, policy: Recompute) -> int:
    """Wrap the forward of each block in place; the number of blocks wrapped. "none" does nothing.

    Non-reentrant checkpointing, so that frozen inputs and keyword arguments work. Problem for a policy that is not
    carried out yet.
    """
    if policy == "none":
        return 0
    if policy != "full":
        raise Problem(f'recompute "{policy}" is not carried out yet; choose "none" or "full"')
    blocks = find_blocks(model)
    for _, block in blocks:
        block.forward = _recomputed(block.forward)
    return len(blocks)


def _recomputed(forward: Any) -> Any:
    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return wrapped
