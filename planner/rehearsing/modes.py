"""The mode under which an engine runs on fake tensors."""

from __future__ import annotations

from typing import Any

import torch
from dsplan.planner.tracing.kernels import GpuKernels
from torch.autograd.graph import _engine_run_backward


class Kernels(GpuKernels):
    """GpuKernels that stays on while backward computes blocks again: Tensor.backward would switch it off."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.backward:
            return super().__torch_function__(func, types, args, kwargs)
        kwargs = kwargs or {}
        with self:
            loss = args[0]
            gradient = args[1] if len(args) > 1 else kwargs.get("gradient")
            if gradient is None:
                gradient = torch.ones_like(loss)
            keep = bool(kwargs.get("retain_graph"))
            return _engine_run_backward(
                (loss,), (gradient,), keep, False, (), allow_unreachable=True, accumulate_grad=True
            )
