"""One step in a line: what it took, and how training stands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dsplan.schemas.units import rate, seconds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def seconds_text(phases: Mapping[str, float], step_seconds: float | None, global_batch: int) -> str:
    """ "forward 12.3 ms, loss 1.1 ms, backward 24 ms, step 3.1 ms; 41 ms in all, 391 samples/s".

    step_seconds: with what the script does between them; None where it is not known.
    """
    parts = ", ".join(f"{name} {seconds(value)}" for name, value in phases.items())
    if step_seconds is None:
        return parts
    between = max(0.0, step_seconds - sum(phases.values()))
    speed = f"{rate(global_batch / step_seconds)} samples/s"
    return f"{parts}, between {seconds(between)}; {seconds(step_seconds)} in all, {speed}"


def progress_text(
    *,
    step: int,
    skipped: int,
    lr: Sequence[float],
    mom: Any,
    loss: float,
    grad_norm: float | None,
    samples_per_second: float,
) -> str:
    """DeepSpeed's line, for tools that read it, and what people look for."""
    norm = "" if grad_norm is None else f", grad_norm={grad_norm:.4g}"
    return (
        f"step={step}, skipped={skipped}, lr={list(lr)}, mom={mom}, loss={loss:.6g}{norm}, "
        f"samples/s={rate(samples_per_second)}"
    )
