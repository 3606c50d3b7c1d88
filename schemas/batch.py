"""The batch equation: global_batch = micro_batch x accumulation x dp."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Batch:
    """The three numbers of the batch equation, all known."""

    global_batch: int
    micro_batch: int
    accumulation: int


def resolve_batch(global_batch: int | None, micro_batch: int | None, accumulation: int | None, dp: int) -> Batch:
    """The batch equation solved as DeepSpeed solves it; ValueError in one line where it does not hold.

    global_batch = micro_batch x accumulation x dp. Source: deepspeed/runtime/config.py, _set_batch_related_parameters.
    """
    for name, value in (
        ("train_batch_size", global_batch),
        ("train_micro_batch_size_per_gpu", micro_batch),
        ("gradient_accumulation_steps", accumulation),
    ):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}, but must be at least 1")
    if global_batch is None and micro_batch is None:
        raise ValueError("neither train_batch_size nor train_micro_batch_size_per_gpu is given; set one of them")
    if micro_batch is not None:
        per_step = micro_batch * dp
        if accumulation is None:
            accumulation = 1 if global_batch is None else global_batch // per_step
        if global_batch is None:
            global_batch = per_step * accumulation
    else:
        assert global_batch is not None
        accumulation = accumulation or 1
        micro_batch = global_batch // (accumulation * dp)
    if global_batch != micro_batch * accumulation * dp or micro_batch < 1 or accumulation < 1:
        raise ValueError(
            f"train_batch_size is {global_batch}, but micro_batch {micro_batch} x accumulation {accumulation} x dp {dp} = "
            f"{micro_batch * accumulation * dp}"
        )
    return Batch(global_batch, micro_batch, accumulation)


def fitting_ranks(global_batch: int, micro_batch: int) -> str:
    """The numbers of ranks on which some accumulation gives the global batch, as words: 1, 2 or 4 ranks."""
    words = [str(n) for n in range(1, global_batch // micro_batch + 1) if global_batch % (micro_batch * n) == 0]
    if len(words) > 8:
        words = [*words[:6], "...", words[-1]]
    return (
        f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else "".join(words) or "no number of"
    ) + " ranks"
