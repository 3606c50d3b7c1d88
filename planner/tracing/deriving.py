"""Recordings of other micro-batches and lengths out of those at hand, where each event's bytes lie on one polynomial."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction

from dsplan.planner.tracing.recording import Event, Recording

DEGREES = (1, 2)
"""Bytes are linear in the micro-batch, and in the length where no scores of attention are written; those are square in it."""


def between(known: Mapping[int, Recording], value: int) -> Recording | None:
    """The recording at a value between those that were traced; None where it must be traced.

    Those count that do the same as the nearest, step by step, and one more of them than the polynomial needs must lie on it,
    to the byte and event by event. Beyond what was traced nothing is said: a window may end there.
    """
    if len(known) < DEGREES[0] + 2 or not min(known) < value < max(known):
        return None
    first = known[min(known, key=lambda at: abs(at - value))]
    known = {at: recording for at, recording in known.items() if _alike(first, recording)}  # one row may run otherwise
    if not min(known) < value < max(known):
        return None
    by_value = {at: [delta for _, delta, _ in recording.events] for at, recording in known.items()}
    for degree in DEGREES:
        base = dict(list(by_value.items())[: degree + 1])
        further = list(by_value.items())[degree + 1 :]
        if further and all(_deltas(base, at) == found for at, found in further):
            deltas = _deltas(base, value)
            return None if deltas is None else replace(first, events=_with(first, deltas), flops=_flops(known, value))
    return None


def _flops(known: Mapping[int, Recording], value: int) -> list[tuple[int, int]]:
    """Linear in the micro-batch, square in the length: three of them tell; nothing where they were not counted."""
    few = dict(list(known.items())[: DEGREES[-1] + 1])
    columns = [
        _deltas({at: [flops[part] for flops in found.flops] for at, found in few.items()}, value) for part in (0, 1)
    ]
    return [] if None in columns else list(zip(*columns, strict=True))


def _alike(one: Recording, other: Recording) -> bool:
    """Whether the same storages come and go in the same modules, whatever their bytes."""
    return (
        len(one.events) == len(other.events)
        and one.labels == other.labels
        and one.cuts == other.cuts
        and one.uses == other.uses
        and one.modules == other.modules
        and all(
            mine[0] == theirs[0] and mine[2] == theirs[2] and (mine[1] > 0) == (theirs[1] > 0)
            for mine, theirs in zip(one.events, other.events, strict=True)
        )
    )


def _deltas(base: Mapping[int, list[int]], value: int) -> list[int] | None:
    """By event, the polynomial through the base at that value (Lagrange); None where it is no whole number of bytes."""
    shares = [
        math.prod((Fraction(value - other, at - other) for other in base if other != at), start=Fraction(1))
        for at in base
    ]
    whole = math.lcm(*(share.denominator for share in shares))
    weights = [int(share * whole) for share in shares]
    made = []
    for deltas in zip(*base.values(), strict=True):
        product = sum(weight * delta for weight, delta in zip(weights, deltas, strict=True))
        if product % whole:
            return None
        made.append(product // whole)
    return made


def _with(recording: Recording, deltas: list[int]) -> list[Event]:
    return [(storage, delta, module) for (storage, _, module), delta in zip(recording.events, deltas, strict=True)]
