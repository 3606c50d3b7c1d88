"""Stage 3: gradients on their way through the bucket to the ranks' parts, parameter by parameter.

Source: deepspeed/runtime/zero/stage3.py of 0.19.8: reduce_independent_p_g_buckets_and_remove_grads, __avg_scatter_grads,
__avg_scatter_contiguous_grads, partition_grads; deepspeed/runtime/comm/coalesced_collectives.py, reduce_scatter_coalesced.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

FULL, COPY, PIECES = range(3)
"""Columns, in bytes: gradients as large as their parameters; a bucket's copies to be sent; reduced parts on their way."""
Row = tuple[int, int, int]
FP64 = 8
NORM_ELEMENTS = 250_000_000
"""Elements of which a norm is taken at once. Source: stage3.py, _constant_buffered_norm2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scatter:
    """How gradients are taken in. bucket in elements; bytes of an element as it is computed, sent, summed, and in the master."""

    bucket: int
    contiguous: bool
    scatters: bool
    """False: the bucket is all-reduced where it lies, if gradients lie in it."""
    degree: int
    computed: int
    sent: int
    summed: int
    master: int
    offloads: bool


@dataclass(frozen=True, slots=True)
class _Member:
    place: int
    numel: int
    apart: bool
    """It does not lie in the bucket's buffer."""


@lru_cache(maxsize=512)
def scattered(
    rules: Scatter, numels: tuple[int, ...], places: tuple[int, ...]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(inside, after) by gradient in the order of backward, and one row more for the end: the three columns.

    places: of the gradients in the model's order, in which a bucket is handed out. A bucket is reduced when the next
    gradient does not fit; a larger one is a bucket of its own.
    """
    inside: list[Row] = []
    after: list[Row] = []
    members: list[_Member] = []
    elements = full = 0
    for numel, place in zip(numels, places, strict=True):
        best = (full + rules.computed * numel, 0, 0)
        if members and elements + numel > rules.bucket:
            best = max(best, _reduction(rules, members, full, rules.computed * numel), key=sum)
            members, elements, full = [], 0, 0
        apart = not (rules.contiguous and elements + numel <= rules.bucket)
        full += rules.computed * numel * apart
        members.append(_Member(place, numel, apart))
        elements += numel
        inside.append(best)
        after.append((full, 0, 0))
    if members:  # the last gradient's hook reduces the rest
        inside[-1] = max(inside[-1], _reduction(rules, members, full, 0), key=sum)
        after[-1] = (0, 0, 0)
    inside.append((0, 0, 0))
    after.append((0, 0, 0))
    return np.array(inside, dtype=np.int64), np.array(after, dtype=np.int64)


def _reduction(rules: Scatter, members: list[_Member], full: int, arriving: int) -> Row:
    """The fullest moment of one bucket's reduction, with a gradient that waits for its end."""
    pieces = [-(-member.numel // rules.degree) for member in members]
    elements = sum(member.numel for member in members)
    casts = rules.sent != rules.summed
    if rules.contiguous and not rules.scatters and elements <= rules.bucket:
        made = rules.summed * elements if casts else 0
        scaled = rules.sent * elements * (rules.degree > 1)  # mul() by gradient_predivide_factor makes a copy
        sending = (full + arriving, scaled, made)
        left = (0, made) if casts else (scaled, 0)
    else:
        upcast = sum(member.numel for member in members if member.apart) if rules.sent != rules.computed else 0
        alone = len(members) == 1 and elements % rules.degree == 0
        flat = 0 if alone else rules.sent * rules.degree * sum(pieces)
        made = rules.summed * sum(pieces) if casts else 0
        sending = (full + arriving, rules.sent * upcast + flat, made)
        left = (0, made) if casts else (flat or rules.sent * upcast, 0)
        members = sorted(members, key=lambda member: member.place)
    if not rules.offloads:
        return sending
    best = sending
    for member in members:  # each part to the device's own buffer, for its norm and its way to the host
        piece = -(-member.numel // rules.degree)
        most = max(FP64 * min(piece, NORM_ELEMENTS), rules.master * piece if rules.master != rules.summed else 0)
        best = max(best, (full + arriving, left[0], left[1] + rules.summed * piece + most), key=sum)
        full -= rules.computed * member.numel * member.apart
    return best
