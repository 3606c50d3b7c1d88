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

FP32, FP64 = 4, 8
FULL, PART, COPY, CAST = range(4)
"""Columns: elements of gradients as large as their parameters and of the own partition; bytes of a bucket's copies, and of
own pieces cast."""
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
    keeps_own: bool
    """Own gradients that do not lie in the bucket stay to the end of backward."""
    scatters: bool
    """reduce_scatter: each slice goes to its rank, so that a bucket of several ranks is flattened."""
    offloads: bool
    """Own pieces leave for the host; a gradient larger than the bucket is cloned first."""
    norms: bool
    """Each own piece is squared in fp64 before it leaves."""
    one_rank: bool
    """use_multi_rank_bucket_allreduce is false: one reduction per rank."""
    sent: int
    """Bytes of an element on its way to other ranks."""
    widths: tuple[int, int]
    """Bytes of an element of the first two columns."""

    def bytes_of(self, row: Row) -> int:
        full, part = self.widths
        return full * row[0] + part * row[1] + row[2] + row[3]


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


def largest_group(begin: int, numel: int, part: int, limit: int, least: int = 2) -> int:
    """Elements of the largest group of at least so many slices of one parameter cut at partitions.

    Slices go together until they exceed limit.
    """
    most = members = gathered = 0
    position, end = begin, begin + numel
    while position < end:
        piece = min(end, (position // part + 1) * part) - position
        position, gathered, members = position + piece, gathered + piece, members + 1
        if gathered > limit or position == end:
            most = max(most, gathered if members >= least else 0)
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
        self.filled = rules.compact and part > 0  # one partition, to which every micro-batch adds

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
        flat, cast = self._copies()
        self._see(flat + cast)
        if rules.compact and rules.sent != FP32:
            self._see(cast or flat, FP32 * max(owners.own[place] for place in self.members))
        for place in self.members:
            numel = self.numels[place]
            alone = not rules.contiguous or numel > rules.bucket  # it is no view of the bucket
            if not owners.own[place]:
                if not rules.keeps_others and alone:
                    if rules.clears_late:
                        self.waiting += numel
                    else:
                        self.full -= numel
            elif rules.contiguous:
                self._fill()
                self._see(0, FP64 * owners.own[place] if rules.norms else 0)
                self.full -= numel if alone and not rules.keeps_own else 0
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

    def _copies(self) -> tuple[int, int]:
        """Bytes of a reduction's largest flat copy, and of that in the dtype that is sent, where it is another.

        What is in one piece is not flattened: a bucket in one buffer of which every slice goes to the same rank.
        """
        rules, owners, members = self.rules, self.owners, self.members
        width = rules.widths[FULL]
        sent = rules.sent if rules.sent != width else 0
        if not rules.contiguous:
            return width * self.elements * (len(members) > 1), sent * self.elements
        if not rules.scatters:
            return 0, sent * self.elements
        if rules.one_rank:
            flat, most = self._by_rank()
            return width * flat, sent * most
        low = min(owners.first[place] for place in members)
        high = max(owners.last[place] for place in members)
        pieces = high - low + 1
        if rules.compact:
            pieces = max(pieces, sum(1 for place in members if owners.own[place]))
        if self.elements <= rules.bucket:
            return width * self.elements * (pieces > 1), sent * self.elements
        (large,) = members
        cut = (owners.begin[large], self.elements, owners.part, rules.bucket)
        return width * largest_group(*cut), sent * largest_group(*cut, least=1)

    def _by_rank(self) -> tuple[int, int]:
        """Elements of the largest reduction to one rank: of several slices, which are flattened, and of any."""
        owners = self.owners
        slices: dict[int, list[int]] = {}
        before = -1
        for place in self.members:
            position, end = owners.begin[place], owners.begin[place] + self.numels[place]
            while position < end:
                rank = position // owners.part
                size = min(end, (rank + 1) * owners.part) - position
                if rank == before and not (rank == 0 and self.rules.compact):
                    slices[rank][-1] += size
                else:
                    slices.setdefault(rank, []).append(size)
                position, before = position + size, rank
        several = max((sum(sizes) for sizes in slices.values() if len(sizes) > 1), default=0)
        return several, max((sum(sizes) for sizes in slices.values()), default=0)


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
        if order:  # the hook of the last gradient reduces the rest
            bucket.inside[-2] = max(bucket.inside[-2:], key=rules.bytes_of)
            bucket.inside[-1] = bucket.after[-2] = bucket.after[-1]
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
