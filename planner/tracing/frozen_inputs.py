"""What linear layers with frozen weights read: torch lets go of it at once, an engine may keep it for their backward."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from dsplan.planner.tracing.timeline import Timeline
from torch import nn
from torch.overrides import TorchFunctionMode


class FrozenInputs(TorchFunctionMode):
    """Writes into the timeline from when to when such a layer would keep its input; changes no byte of what is traced."""

    def __init__(self, timeline: Timeline):
        super().__init__()
        self._timeline = timeline

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return func(*self._watched(*args, **kwargs)) if func is F.linear else func(*args, **kwargs)

    def _watched(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[Any, ...]:
        if input.requires_grad and not weight.requires_grad and torch.is_grad_enabled():
            mark = self._timeline.mark_read(input)
            if mark is not None:
                input = _Read.apply(input, mark)  # type: ignore[no-untyped-call]
        return input, weight, bias


class _Read(torch.autograd.Function):
    """Its input; saves the mark, which therefore lives as long as what the layer saves: also where blocks are recomputed."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, mark: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(mark)
        return input.view_as(input)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, None]:
        return gradients[0], None


def watching(model: nn.Module, timeline: Timeline) -> AbstractContextManager[Any]:
    """The mode to be on beside the timeline, where the model has a frozen matrix."""
    frozen = any(not param.requires_grad and param.dim() == 2 for param in model.parameters())
    return FrozenInputs(timeline) if frozen else contextlib.nullcontext()
