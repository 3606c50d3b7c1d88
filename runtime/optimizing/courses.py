"""How DeepSpeed's schedules run: the number of a step -> the learning rate of each group.

Source: deepspeed/runtime/lr_schedules.py (0.19.8), in the same order of operations, so that the rates are equal to the bit.
Each function takes the groups' own rates and the schedule's parameters, and raises ValueError for a value that it cannot take.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from dsplan.runtime.groups import note

Lrs = list[float]
PerGroup = float | list[float]
Betas = tuple[float, float]
SECOND_BETA = 0.99
"""What OneCycle sets beside the momentum. Source: OneCycle._initialize_momentum."""


@dataclass(frozen=True)
class Course:
    """lr_at and betas_at take the number of the last step; -1 is before the first."""

    lr_at: Callable[[int], Lrs]
    betas_at: Callable[[int], list[Betas]] | None = None
    first_betas: list[Betas] | None = None
    """What the first step runs with: OneCycle begins with the smallest momentum, though at step 0 it is the largest."""


def warmup(
    lrs: Lrs,
    warmup_min_lr: PerGroup = 0.0,
    warmup_max_lr: PerGroup | None = None,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
) -> Course:
    """WarmupLR: from min to max in warmup_num_steps, then flat. Without warmup_max_lr the optimizer's lr is the peak."""
    ramp = _ramp(warmup_num_steps, warmup_type)
    return Course(_between(lrs, warmup_min_lr, warmup_max_lr, ramp))


def warmup_decay(
    lrs: Lrs,
    total_num_steps: int,
    warmup_min_lr: PerGroup = 0.0,
    warmup_max_lr: PerGroup | None = 0.001,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
) -> Course:
    """WarmupDecayLR: as WarmupLR, then linearly down to nothing at total_num_steps."""
    ramp, warm = _ramp(warmup_num_steps, warmup_type), _warm(warmup_num_steps, total_num_steps)

    def share(step: int) -> float:
        if step < warm:
            return ramp(step)
        return max(0.0, float(total_num_steps - step) / float(max(1.0, total_num_steps - warm)))

    return Course(_between(lrs, warmup_min_lr, warmup_max_lr, share))


def warmup_cosine(
    lrs: Lrs,
    total_num_steps: int,
    warmup_min_ratio: float = 0.0,
    warmup_num_steps: int = 1000,
    cos_min_ratio: float = 0.0001,
    warmup_type: str = "log",
) -> Course:
    """WarmupCosineLR: shares of the optimizer's lr, up from warmup_min_ratio, then along half a cosine to cos_min_ratio."""
    ramp, warm = _ramp(warmup_num_steps, warmup_type), _warm(warmup_num_steps, total_num_steps)

    def ratio(step: int) -> float:
        if step < 0:
            return 0.0
        if step < warm:
            return warmup_min_ratio + ramp(step) * (1.0 - warmup_min_ratio)
        progress = min(1.0, (step - warm + 1) / max(1, total_num_steps - warm))
        return max(0.0, cos_min_ratio + (1.0 - cos_min_ratio) * ((1 + math.cos(math.pi * progress)) / 2))

    return Course(lambda step: [lr * ratio(step) for lr in lrs])


def range_test(
    lrs: Lrs,
    lr_range_test_min_lr: PerGroup = 1e-3,
    lr_range_test_step_size: int = 2000,
    lr_range_test_step_rate: float = 1.0,
    lr_range_test_staircase: bool = False,
) -> Course:
    """LRRangeTest: up without end, by the rate every step_size steps, evenly or in stairs. arXiv:1803.09820."""
    lows = _per_group(lrs, lr_range_test_min_lr, "lr_range_test_min_lr")
    size = lr_range_test_step_size
    if not isinstance(size, int) or size <= 0:
        raise ValueError(f"lr_range_test_step_size is {size}, but must be a positive whole number")

    def at(step: int) -> Lrs:
        interval = float(step + 1) / size
        growth = 1 + lr_range_test_step_rate * (math.floor(interval) if lr_range_test_staircase else interval)
        return [low * growth for low in lows]

    return Course(at)


def one_cycle(
    lrs: Lrs,
    cycle_min_lr: PerGroup,
    cycle_max_lr: PerGroup,
    decay_lr_rate: float = 0.0,
    cycle_first_step_size: float = 2000,
    cycle_second_step_size: float | None = None,
    cycle_first_stair_count: int = 0,
    cycle_second_stair_count: int | None = None,
    decay_step_size: float = 0,
    cycle_momentum: bool = True,
    cycle_min_mom: PerGroup = 0.8,
    cycle_max_mom: PerGroup = 0.9,
    decay_mom_rate: float = 0.0,
) -> Course:
    """OneCycle: up and down once, the first beta the other way round, then slowly on. arXiv:1803.09820."""
    first = float(cycle_first_step_size)
    second = first if cycle_second_step_size is None else float(cycle_second_step_size)
    if first <= 0 or second < 0:
        raise ValueError("cycle_first_step_size must be positive, and cycle_second_step_size at least 0")
    total = first + second
    stairs = (
        cycle_first_stair_count,
        cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count,
    )
    lows, highs = _per_group(lrs, cycle_min_lr, "cycle_min_lr"), _per_group(lrs, cycle_max_lr, "cycle_max_lr")
    decays = not math.isclose(decay_step_size, 0)
    # One switch for both, as in DeepSpeed: where the momentum is not cycled its own decay is never looked at.
    decays_lr, decays_mom = (
        decays and not math.isclose(decay_lr_rate, 0),
        decays and not math.isclose(decay_mom_rate, 0),
    )

    def height(step: int) -> float:
        return _height(step + 1, first, second, stairs)

    def lr_at(step: int) -> Lrs:
        if step < total:
            return [low + (high - low) * height(step) for low, high in zip(lows, highs, strict=True)]
        interval = (step - total + 1) / decay_step_size if decays_lr else 0.0
        return [low / (1 + decay_lr_rate * interval) for low in lows] if decays_lr else list(lows)

    if not cycle_momentum:
        return Course(lr_at)
    low_moms = _per_group(lrs, cycle_min_mom, "cycle_min_mom")
    high_moms = _per_group(lrs, cycle_max_mom, "cycle_max_mom")

    def betas_at(step: int) -> list[Betas]:
        if step < total:
            return [
                (high - (high - low) * height(step), SECOND_BETA) for low, high in zip(low_moms, high_moms, strict=True)
            ]
        if not decays_mom:
            return [(high, SECOND_BETA) for high in high_moms]
        interval = (step - total + 1) / decay_step_size
        return [(high * (1 + decay_mom_rate * interval), SECOND_BETA) for high in high_moms]

    return Course(lr_at, betas_at, [(low, SECOND_BETA) for low in low_moms])


def _height(step: int, first: float, second: float, stairs: tuple[int, int]) -> float:
    """0 at the ends of the cycle, 1 at its top; in stairs where there are any. Source: OneCycle._get_scale_factor."""
    total = first + second
    ratio = first / total
    x = 1.0 + step / total - math.floor(1 + step / total)
    rises = x <= ratio
    count = stairs[0] if rises else stairs[1]
    if count > 0:
        inside = step % total
        position = inside * count / first if inside <= first else (total - inside) * count / second
        return math.floor(position) / count
    return x / ratio if rises else (x - 1) / (ratio - 1)


def _warm(num_steps: int, total: int) -> int:
    warm = max(2, num_steps)
    if total < warm:
        note(f"total_num_steps {total} is less than warmup_num_steps {warm}")
    return warm


def _ramp(num_steps: int, kind: str) -> Callable[[int], float]:
    """The share of the way up, from 0 to 1. A kind that is neither log nor linear is taken for log, as DeepSpeed does."""
    if not isinstance(num_steps, int) or num_steps <= 0:
        raise ValueError(f"warmup_num_steps is {num_steps}, but must be a positive whole number")
    if kind not in ("log", "linear"):
        note(f"warmup_type is {kind!r}, neither log nor linear: taken for log")
    warm = max(2, num_steps)
    inverse_log = 1.0 / math.log(warm)

    def share(step: int) -> float:
        if step >= warm:
            return 1.0
        return step / warm if kind == "linear" else inverse_log * math.log(step + 1)

    return share


def _between(lrs: Lrs, low: PerGroup, high: PerGroup | None, share: Callable[[int], float]) -> Callable[[int], Lrs]:
    lows = _per_group(lrs, low, "warmup_min_lr")
    highs = list(lrs) if high is None else _per_group(lrs, high, "warmup_max_lr")

    def at(step: int) -> Lrs:
        if step < 0:
            return list(lows)
        return [bottom + (top - bottom) * share(step) for bottom, top in zip(lows, highs, strict=True)]

    return at


def _per_group(lrs: Lrs, given: PerGroup, name: str) -> Lrs:
    if not isinstance(given, (list, tuple)):
        return [given] * len(lrs)
    if len(given) != len(lrs):
        raise ValueError(f"{name} lists {len(given)} values, but the optimizer has {len(lrs)} groups")
    return list(given)


COURSES: dict[str, Callable[..., Course]] = {
    "WarmupLR": warmup,
    "WarmupDecayLR": warmup_decay,
    "WarmupCosineLR": warmup_cosine,
    "OneCycle": one_cycle,
    "LRRangeTest": range_test,
}
