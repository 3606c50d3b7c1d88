"""Learning-rate schedules of the JSON. Each is one function: step number -> share of the way, by DeepSpeed's formulas.

Source: deepspeed/runtime/lr_schedules.py (0.19.8). A schedule moves after each step that was not skipped, so that the
first two steps run at its start.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from dsplan.schemas.config import Named
from dsplan.schemas.problem import Problem
from torch.optim import Optimizer


class Schedule:
    """Sets lr of every group from the number of the last step; -1 before the first."""

    def __init__(self, optimizer: Optimizer, lr_at: Callable[[int], list[float]], last_batch_iteration: int = -1):
        self.optimizer = optimizer
        self._lr_at = lr_at
        self.last_batch_iteration = last_batch_iteration
        self._apply()

    def step(self, last_batch_iteration: int | None = None) -> None:
        following = self.last_batch_iteration + 1
        self.last_batch_iteration = following if last_batch_iteration is None else last_batch_iteration
        self._apply()

    def get_lr(self) -> list[float]:
        return self._lr_at(self.last_batch_iteration)

    def get_last_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, int]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.last_batch_iteration = state["last_batch_iteration"]
        self._apply()

    def _apply(self) -> None:
        for group, lr in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = lr


def build_schedule(named: Named, optimizer: Optimizer) -> Schedule:
    """The schedule that the JSON names, bound to the optimizer. Problem for an unknown name or parameter."""
    makers = _makers()
    if named.type not in makers:
        raise Problem(f"scheduler.type {named.type} is not carried out by the native engine; use {', '.join(makers)}")
    params = dict(named.params)
    last = params.pop("last_batch_iteration", -1)
    try:
        return Schedule(
            optimizer, makers[named.type]([group["lr"] for group in optimizer.param_groups], **params), last
        )
    except TypeError as error:
        raise Problem(f"scheduler.params: {named.type} does not take these ({error})") from error


def wrong_params(named: Named, *, whole: bool) -> list[str]:
    """Every parameter that the schedule does not take and, where params is whole, that it lacks."""
    maker = _makers().get(named.type)
    if maker is None:  # native_support says so
        return []
    known = dict(inspect.signature(maker).parameters)
    del known["lrs"]
    unknown = [key for key in named.params if key not in known and key != "last_batch_iteration"]
    absent = [key for key, value in known.items() if value.default is value.empty and key not in named.params]
    found = [f"{named.type} does not take {', '.join(unknown)}"] if unknown else []
    return found + ([f"{named.type} needs {', '.join(absent)}"] if absent and whole else [])


def _makers() -> dict[str, Callable[..., Callable[[int], list[float]]]]:
    return {"WarmupLR": _warmup, "WarmupDecayLR": _warmup_decay, "WarmupCosineLR": _warmup_cosine}


Lrs = list[float]


def _warmup(
    lrs: Lrs,
    warmup_min_lr: float | Lrs = 0.0,
    warmup_max_lr: float | Lrs | None = None,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
) -> Callable[[int], Lrs]:
    """From min to max in warmup_num_steps, then flat. Without warmup_max_lr the optimizer's lr is the peak."""
    return _between(lrs, warmup_min_lr, warmup_max_lr, _ramp(warmup_num_steps, warmup_type))


def _warmup_decay(
    lrs: Lrs,
    total_num_steps: int,
    warmup_min_lr: float | Lrs = 0.0,
    warmup_max_lr: float | Lrs | None = 0.001,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
) -> Callable[[int], Lrs]:
    """As WarmupLR, then linearly down to nothing at total_num_steps."""
    ramp, warm = _ramp(warmup_num_steps, warmup_type), max(2, warmup_num_steps)

    def share(step: int) -> float:
        return ramp(step) if step < warm else max(0.0, (total_num_steps - step) / max(1.0, total_num_steps - warm))

    return _between(lrs, warmup_min_lr, warmup_max_lr, share)


def _warmup_cosine(
    lrs: Lrs,
    total_num_steps: int,
    warmup_min_ratio: float = 0.0,
    warmup_num_steps: int = 1000,
    cos_min_ratio: float = 0.0001,
    warmup_type: str = "log",
) -> Callable[[int], Lrs]:
    """Shares of the optimizer's lr: up from warmup_min_ratio, then along half a cosine to cos_min_ratio."""
    ramp, warm = _ramp(warmup_num_steps, warmup_type), max(2, warmup_num_steps)

    def ratio(step: int) -> float:
        if step < 0:
            return 0.0
        if step < warm:
            return warmup_min_ratio + ramp(step) * (1.0 - warmup_min_ratio)
        wave = (1 + math.cos(math.pi * (step - warm + 1) / (total_num_steps - warm))) / 2
        return max(0.0, cos_min_ratio + (1.0 - cos_min_ratio) * wave)

    return lambda step: [lr * ratio(step) for lr in lrs]


def _ramp(num_steps: int, kind: str) -> Callable[[int], float]:
    warm = max(2, num_steps)

    def share(step: int) -> float:
        if step >= warm:
            return 1.0
        return step / warm if kind == "linear" else math.log(step + 1) / math.log(warm)

    return share


def _between(
    lrs: Lrs, low: float | Lrs, high: float | Lrs | None, share: Callable[[int], float]
) -> Callable[[int], Lrs]:
    lows = low if isinstance(low, list) else [low] * len(lrs)
    highs = lrs if high is None else high if isinstance(high, list) else [high] * len(lrs)
    if len(lows) != len(lrs) or len(highs) != len(lrs):
        raise Problem(f"scheduler.params: lr lists must have one entry for each of the optimizer's {len(lrs)} groups")

    def at(step: int) -> Lrs:
        if step < 0:
            return list(lows)
        return [bottom + (top - bottom) * share(step) for bottom, top in zip(lows, highs, strict=True)]

    return at


def is_schedule(value: Any) -> bool:
    """Whether the value is a scheduler (and not a function that makes one)."""
    return hasattr(value, "step") and hasattr(value, "state_dict")
