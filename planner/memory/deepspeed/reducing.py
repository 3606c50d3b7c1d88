"""Stages 1 and 2: gradients on their way through the reduce bucket, parameter by parameter.

Source: deepspeed/runtime/zero/stage_1_and_2.py of 0.19.8: reduce_independent_p_g_buckets_and_remove_grads,
reduce_ipg_grads, average_tensor, allreduce_and_scatter, copy_grads_in_partition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

FULL, PART, COPY, CAST = range(4)
"""Columns, in elements: gradients as large as their parameters; own partition; flat copy of a bucket; own pieces in fp32, or fp64."""
Row = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How gradients are taken in. Sizes in elements."""

    bucket: int
    contiguous: bool
    keeps_others: bool
    """Stage 1: gradients of other ranks' partitions stay to the end of backward."""
    clears_late: bool
    """Those of other ranks' partitions go one reduction later (overlap_comm without contiguous gradients)."""
    compact: bool
    """Gradients are summed in fp32 in the partition itself (grad_accum_dtype fp32 beside 16-bit parameters)."""
    scatters: bool
    """reduce_scatter: each slice goes to its rank, so that a bucket of several ranks is flattened."""
    offloads: bool
    """Own pieces leave for the host, after a norm of each; a gradient larger than the bucket is cloned first."""
    one_rank: bool
    """use_multi_rank_bucket_allreduce is false: one reduction per rank."""
    widths: Row
    """Bytes of an element of each column."""

    def bytes_of(self, row: Row) -> int:
        full, part, copy, cast = self.widths
        return full * row[0] + part * row[1] + copy * row[2] + cast * row[3]


@dataclass(frozen=True, slots=True, eq=False)
class Ownership:
    """By parameter: where it begins in the flat group, its first and last partition, the elements that rank 0 owns of it.

    Two are the same only where `ownership` remembered them.
    """

    begin: Sequence[int]
    first: Sequence[int]
    last: Sequence[int]
    own: Sequence[int]
    part: int


@lru_cache(maxsize=512)
def ownership(numels: tuple[int, ...], part: int) -> Ownership:
    """Of parameters laid one after the other and cut in partitions of `part` elements; rank 0 has the first."""
    sizes, part = np.array(numels, dtype=np.int64), max(part, 1)
    begin = np.cumsum(sizes) - sizes
    last = (begin + np.maximum(sizes, 1) - 1) // part
    own = np.clip(part - begin, 0, sizes)
    return Ownership(begin.tolist(), (begin // part).tolist(), last.tolist(), own.tolist(), part)


def largest_group(begin: int, numel: int, part: int, limit: int) -> int:
    """Elements of the largest flat copy for one parameter cut at partitions: slices go together until they exceed limit."""
    most = members = gathered = 0
    position, end = begin, begin + numel
    while position < end:
        piece = min(end, (position // part + 1) * part) - position
        position, gathered, members = position + piece, gathered + piece, members + 1
        if gathered > limit or position == end:
            most = max(most, gathered if members > 1 else 0)
            gathered = members = 0
    return most


class _Bucket:
    """One bucket's filling and emptying. inside, after: by gradient, the columns at the fullest and at the end."""

    def __init__(self, rules: Rules, numels: Sequence[int], owners: Ownership, held: int, part: int):
        self.rules, self.numels, self.owners = rules, numels, owners
        self.full, self.part = held, part
        self.elements = 0
        self.members: list[int] = []
        self.waiting = 0
        self.inside: list[Row] = []
        self.after: list[Row] = []
        self.total = sum(numel for numel, own in zip(numels, owners.own, strict=True) if own)
        self.filled = False

    def take(self, place: int, arrives: bool) -> None:
        """A gradient; arrives: it was not among those held."""
        rules, numel = self.rules, self.numels[place]
        self.full += numel if arrives else 0
        self.best = (self.full, self.part, 0, 0)
        if self.elements + numel > rules.bucket:
            self.reduce()
        if rules.contiguous and numel <= rules.bucket:
            self.full -= numel
        elif rules.contiguous and rules.offloads:
            self._see(numel)
        self.members.append(place)
        self.elements += numel
        self.inside.append(self.best)
        self.after.append((self.full, self.part, 0, 0))

    def finish(self) -> None:
        """The end of backward."""
        self.best = (self.full, self.part, 0, 0)
        self.reduce()
        self._fill()
        self.inside.append(self.best)
        self.after.append((0, self.part, 0, 0))

    def reduce(self) -> None:
        if not self.members:
            return
        rules, owners = self.rules, self.owners
        if rules.clears_late:
            self.full -= self.waiting
            self.waiting = 0
        if rules.compact and any(owners.own[place] for place in self.members):
            self._fill()
        pieces = [owners.own[place] for place in self.members] if rules.compact else [0]
        self._see(self._copied(), max(pieces))
        for place in self.members:
            numel = self.numels[place]
            alone = not rules.contiguous or numel > rules.bucket  # it is no view of the bucket
            if not owners.own[place]:
                if not rules.keeps_others and alone:
                    if rules.clears_late:
                        self.waiting += numel
                    else:
                        self.full -= numel
            elif rules.contiguous and not rules.compact:
                self._fill()
                self._see(0, owners.own[place] if rules.offloads else 0)
                self.full -= numel if alone else 0
        self.members.clear()
        self.elements = 0

    def _fill(self) -> None:
        if not self.filled and (
            self.rules.compact or (self.rules.contiguous and self.total and not self.rules.offloads)
        ):
            self.filled = True
            self.part += self.owners.part if self.rules.compact else self.total

    def _see(self, copy: int, cast: int = 0) -> None:
        now = (self.full, self.part, copy, cast)
        if self.rules.bytes_of(now) > self.rules.bytes_of(self.best):
            self.best = now

    def _copied(self) -> int:
        """Elements of the flat copy that a reduction makes: none where all goes to one rank in one piece."""
        rules, owners, members = self.rules, self.owners, self.members
        if not rules.contiguous:
            return self.elements if len(members) > 1 else 0
        if not rules.scatters or rules.one_rank:
            return 0
        low = min(owners.first[place] for place in members)
        high = max(owners.last[place] for place in members)
        pieces = high - low + 1
        if rules.compact:
            pieces = max(pieces, sum(1 for place in members if owners.own[place]))
        if pieces == 1:
            return 0
        if self.elements <= rules.bucket:
            return self.elements
        (large,) = members
        return largest_group(owners.begin[large], self.elements, owners.part, rules.bucket)


@lru_cache(maxsize=512)
def reduced(
    rules: Rules,
    numels: tuple[int, ...],
    order: tuple[int, ...],
    owners: Ownership,
    *,
    held: int,
    at_end: bool,
    part: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(inside, after): [gradient, column] in the order of backward, and one row more for the end.

    order: places in numels. held: elements of gradients that were there when backward began; they are among those to
    come. at_end: nothing is reduced before the end, and then in the model's order. part: kept of earlier micro-batches.
    Remembered: traces of other micro-batches, and of the other 16-bit precision, have the same.
    """
    bucket = _Bucket(rules, numels, owners, held, part)
    if not at_end:
        for place in order:
            bucket.take(place, arrives=not held)
        bucket.finish()
        return np.array(bucket.inside, dtype=np.int64), np.array(bucket.after, dtype=np.int64)
    rows_in, rows_after, full = [], [], held
    for place in order:
        rows_in.append((full + numels[place], part, 0, 0))
        full += 0 if held else numels[place]
        rows_after.append((full, part, 0, 0))
    bucket.full = full
    for place in sorted(order):
        bucket.take(place, arrives=False)
    bucket.finish()
    rows_in.append(max(bucket.inside, key=rules.bytes_of))
    rows_after.append(bucket.after[-1])
    return np.array(rows_in, dtype=np.int64), np.array(rows_after, dtype=np.int64)
