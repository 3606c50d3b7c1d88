"""The schedules that a JSON may hold, as classes of an optimizer and the JSON's parameters."""

from __future__ import annotations

from typing import Any

from dsplan.runtime.optimizing.courses import COURSES
from dsplan.runtime.optimizing.schedules import Schedule
from torch.optim import Optimizer

LR_RANGE_TEST, ONE_CYCLE = "LRRangeTest", "OneCycle"
WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR = "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]


class _Named(Schedule):
    """A class bears the name of its course: Accelerate tells schedules by it."""

    def __init__(self, optimizer: Optimizer, *args: Any, last_batch_iteration: int = -1, **params: Any):
        lrs = [float(group["lr"]) for group in optimizer.param_groups]
        super().__init__(optimizer, COURSES[type(self).__name__](lrs, *args, **params), last_batch_iteration)


class WarmupLR(_Named):
    """Warm-up, then flat."""


class WarmupDecayLR(_Named):
    """Warm-up, then down to 0."""


class WarmupCosineLR(_Named):
    """Warm-up, then a cosine."""


class OneCycle(_Named):
    """Up, down, and on down."""


class LRRangeTest(_Named):
    """Ever up."""
