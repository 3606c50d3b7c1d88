"""The trace as rows: every moment that can be a peak, for one pipeline stage. Engines lay their own bytes over it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from dsplan.schemas.choices import PipelineSchedule
from dsplan.schemas.layout import Layout
from dsplan.schemas.ledger import Category, MemoryItem
from dsplan.schemas.trace import Segment, Trace, Unit
from numpy.typing import NDArray

Bytes = NDArray[np.int64]
START, DURING, END = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Visits:
    """Which units were visited up to each segment: visits @ values by unit -> sums by segment.

    As a matrix [segment, unit] it would grow with the square of the blocks; units come in an order, so a running sum does.
    """

    order: NDArray[np.int64]
    """-1, then units by their first visit in forward, then those in backward."""
    upto: NDArray[np.int64]
    since: NDArray[np.int64]
    """By segment: the sum runs over order[since + 1 : upto + 1]."""
    again: NDArray[np.int64] | None
    """By segment: the unit that is visited once more and so is not counted, or -1. None: there is none at all."""

    def __matmul__(self, values: Bytes) -> Bytes:
        """values by unit, with 0 as their last entry."""
        running = values[self.order].cumsum()
        found: Bytes = running[self.upto] - running[self.since]
        return found if self.again is None else found - values[self.again]

    def of(self, segments: NDArray[np.int64]) -> Visits:
        again = None if self.again is None else self.again[segments]
        return Visits(self.order, self.upto[segments], self.since[segments], again)


@dataclass(frozen=True, slots=True)
class Timeline:
    """Rows of one pipeline stage, without those that cannot be the peak (`ends_of_runs`). A segment has a START row, a DURING row per point, and an END row.

    START and END are the moments in which the engine works around the segment (gathers before, reduces after).
    Arrays by row: segment, kind, activation, split, grad. Arrays by segment: unit, backward, and neighbours as unit
    indices, -1 where there is none.
    """

    pp: int
    pp_stage: int
    like: int
    """The first stage that is the same in all but its place."""
    units: tuple[int, ...]
    """Units that this stage holds: the blocks of its cut, and 0 where it holds parts outside the blocks."""
    segment: NDArray[np.int64]
    kind: NDArray[np.int64]
    place: NDArray[np.int64]
    """kind x segments + segment."""
    activation: Bytes
    """Of one micro-batch of this stage alone."""
    split: Bytes
    alone: Bytes
    """The same where nothing is saved for backward: what the segment itself makes, and what it was given."""
    grad: Bytes
    saved_bytes: int
    """Activations that one more micro-batch in flight keeps; `saved_split_bytes` is the part that tp divides."""
    saved_split_bytes: int
    left_bytes: int
    """Activations at the end of backward: inputs, and what the loop still holds."""
    names: tuple[str, ...]
    """By segment, for people."""
    unit: NDArray[np.int64]
    backward: NDArray[np.bool_]
    gathered_before: NDArray[np.int64]
    """In forward: the unit that was gathered before this one (a segment outside the blocks: the last one)."""
    next_block: NDArray[np.int64]
    """In backward: the block whose backward comes next."""
    reduced_before: NDArray[np.int64]
    """In backward: the unit whose gradients were reduced last."""
    block_visits: Visits
    """@ values by unit: the sum over blocks whose forward (or backward) began before or in each segment."""
    block_done: Visits
    """@ values by unit: the sum over blocks whose forward (or backward) ended before each segment."""
    root_grad: Bytes
    """By segment: gradients of the parts outside the blocks that earlier segments left."""

    def rows(self, start: Bytes | int, during: Bytes | int, end: Bytes | int) -> Bytes:
        """By row, from values by segment for each kind of row."""
        table = np.empty((3, len(self.unit)), dtype=np.int64)
        table[START], table[DURING], table[END] = start, during, end
        found: Bytes = table.reshape(-1)[self.place]
        return found


@dataclass(frozen=True, slots=True)
class Layer:
    """One kind of bytes that an engine holds, by row of the timeline, and how to explain a row."""

    category: Category
    bytes: Bytes | int
    why: Callable[[int], str] | str


def items_at(layers: list[Layer], row: int) -> tuple[MemoryItem, ...]:
    """The layers that hold bytes at that row, as ledger items."""
    items = []
    for layer in layers:
        held = layer.bytes if isinstance(layer.bytes, int) else int(layer.bytes[row])
        if held:
            why = layer.why if isinstance(layer.why, str) else layer.why(row)
            items.append(MemoryItem(category=layer.category, bytes=held, why=why))
    return tuple(items)


def in_flight(layout: Layout, pp_stage: int, micro_batches: int, schedule: PipelineSchedule, chunks: int) -> Fraction:
    """Micro-batches whose activations a pipeline stage holds at once; interleaved stages hold parts of them.

    GPipe: all of them. 1F1B: pp - pp_stage. Interleaved, over `chunks` parts of 1/chunks of the stage each: as many parts as
    are warmed up, and the running one. Source: Narayanan et al. 2021 (arXiv:2104.04473), section 2.2; Megatron-LM,
    megatron/core/pipeline_parallel/schedules.py, get_pp_rank_microbatches; Korthikanti et al. 2022 (arXiv:2205.05198), 4.2.3.
    """
    if layout.pp == 1 or schedule == "gpipe":
        return Fraction(micro_batches if layout.pp > 1 else 1)
    if schedule == "interleaved" and chunks > 1:
        warm = 2 * (layout.pp - pp_stage - 1) + (chunks - 1) * layout.pp
        return Fraction(min(warm + 1, micro_batches * chunks), chunks)
    return Fraction(min(layout.pp - pp_stage, micro_batches))


def one_gradient(timeline: Timeline, own: Bytes, outside: Bytes, largest: Bytes, unit_bytes: Bytes) -> Bytes:
    """By row: full-size gradients where each is taken away, or added to a sum, as soon as it is whole.

    own: by row, all of the running unit. outside: by row, those outside the blocks that wait. largest, unit_bytes: by
    unit. Gradients of a parameter that is used twice wait for each other, and then for their sum: the trace tells such a
    unit by more gradients than it has parameters.
    """
    unit = timeline.unit[timeline.segment]
    most = np.zeros(len(largest), dtype=np.int64)
    np.maximum.at(most, unit, own)
    shared = most > unit_bytes
    held = np.minimum(own, np.where(shared[unit], 3, 1) * largest[unit])
    if shared[0]:
        held = held + np.minimum(outside, largest[0])
    return np.where(timeline.kind == END, 0, held)


def timelines(trace: Trace, pp: int) -> tuple[Timeline, ...]:
    """The timeline of each pipeline stage; remembered per trace. Empty where nothing was traced."""
    key = (id(trace), pp)
    found = _remembered.get(key)
    if found is None or found[0] is not trace:
        if len(_remembered) > 256:
            _remembered.clear()
        stages: tuple[Timeline, ...] = ()
        first: dict[object, int] = {}
        for number in range(pp) if trace.segments else ():
            stage = _timeline(trace, pp, number)
            stages += (replace(stage, like=first.setdefault(_looks(trace, stage), number)),)
        found = _remembered[key] = (trace, stages)
    return found[1]


_remembered: dict[tuple[int, int], tuple[Trace, tuple[Timeline, ...]]] = {}


def _looks(trace: Trace, stage: Timeline) -> object:
    """Equal for stages that hold the same bytes, but for micro-batches in flight."""
    kinds = tuple(unit_kinds(trace)[unit] for unit in stage.units if unit)
    part = 0 if stage.pp_stage == 0 else 2 if stage.pp_stage == stage.pp - 1 else 1
    arrays = (stage.activation, stage.split, stage.alone, stage.grad, stage.segment, stage.kind, stage.backward)
    return (part, kinds, stage.saved_bytes, stage.left_bytes, *(array.tobytes() for array in arrays))


def block_cut(blocks: int, pp: int) -> list[range]:
    """Contiguous cut of the blocks into pp parts; the first ones are longer by one where it does not divide."""
    short, longer = divmod(blocks, pp)
    bounds = [stage * short + min(stage, longer) for stage in range(pp + 1)]
    return [range(1 + low, 1 + high) for low, high in itertools.pairwise(bounds)]


def _timeline(trace: Trace, pp: int, pp_stage: int) -> Timeline:
    cut = block_cut(len(trace.blocks), pp)[pp_stage]
    kept = [segment for segment, stage in zip(trace.segments, stages_of(trace, pp), strict=True) if stage == pp_stage]
    first_forward = next(segment for segment in kept if segment.phase == "forward")
    last_forward = [segment for segment in kept if segment.phase == "forward"][-1]
    base, base_split, boundary = 0, 0, 0
    if pp_stage:
        # what earlier stages saved is theirs; this stage receives its input, as large as that of the first block
        opening = next(s for s in trace.segments if s.unit and s.phase == "forward")
        base, base_split = first_forward.start.activation_bytes, first_forward.start.split_bytes
        boundary = opening.start.activation_bytes
    held_root = 0
    root_grad, carried = [], []
    for segment in kept:
        outside = segment.phase == "backward" and segment.unit == 0
        # what lies outside the blocks keeps its gradients to the end, also those that the trace lets go between
        carried.append(max(0, held_root - segment.start.grad_bytes) if outside else 0)
        root_grad.append(0 if outside else held_root)
        held_root = segment.end.grad_bytes + carried[-1] if outside else held_root
    gathered_before, next_block, reduced_before = _neighbours(kept)
    visits, done = _visits(kept)
    chosen = list(range(len(kept))) if done.again is not None else ends_of_runs(trace, kept, root_grad, carried)
    points = []
    for index, number in enumerate(chosen):
        segment = kept[number]
        points.append((index, START, segment.start))
        points += [(index, DURING, point) for point in segment.points]
        points.append((index, END, segment.end))
    pick = np.array(chosen, dtype=np.int64)
    last = kept[-1].end
    first_block = next((s for s in trace.segments if s.unit and s.phase == "forward"), first_forward)
    given = first_block.start.activation_bytes  # inputs, and what is handed from block to block
    return Timeline(
        pp=pp,
        pp_stage=pp_stage,
        like=pp_stage,
        units=((0,) if pp_stage in (0, pp - 1) else ()) + tuple(cut),
        segment=np.array([index for index, _, _ in points], dtype=np.int64),
        kind=np.array([kind for _, kind, _ in points], dtype=np.int64),
        place=np.array([kind * len(chosen) + index for index, kind, _ in points], dtype=np.int64),
        activation=np.array([p.activation_bytes - base + boundary for _, _, p in points], dtype=np.int64).clip(min=0),
        split=np.array([p.split_bytes - base_split for _, _, p in points], dtype=np.int64).clip(min=0),
        alone=np.array(
            [given + p.activation_bytes - kept[chosen[i]].start.activation_bytes for i, _, p in points]
        ).clip(min=0),
        grad=np.array([point.grad_bytes + carried[chosen[index]] for index, _, point in points], dtype=np.int64),
        saved_bytes=max(0, last_forward.end.activation_bytes - base + boundary),
        saved_split_bytes=max(0, last_forward.end.split_bytes - base_split),
        left_bytes=max(0, last.activation_bytes - base + boundary),
        names=tuple(trace.units[kept[index].unit].name or "the parts outside the blocks" for index in chosen),
        unit=np.array([kept[index].unit for index in chosen], dtype=np.int64),
        backward=np.array([kept[index].phase == "backward" for index in chosen]),
        gathered_before=gathered_before[pick],
        next_block=next_block[pick],
        reduced_before=reduced_before[pick],
        block_visits=visits.of(pick),
        block_done=done.of(pick),
        root_grad=np.array(root_grad, dtype=np.int64)[pick],
    )


LONGEST_PERIOD = 6
"""Blocks of one kind may take turns with others; runs of up to so many segments that repeat are found."""


def ends_of_runs(trace: Trace, kept: list[Segment], root_grad: list[int], carried: list[int]) -> list[int]:
    """The segments that can hold a peak: of equal ones in a row, the first and last two.

    In a run of equal blocks whose bytes grow by the same from one to the next, every engine's bytes change by the same too,
    so that none in the middle exceeds both ends.
    """
    shapes = unit_kinds(trace)
    keys = [(s.phase, s.unit == 0, shapes[s.unit], len(s.points)) for s in kept]
    values = [
        (
            *(n for p in (s.start, *s.points, s.end) for n in (p.activation_bytes, p.split_bytes, p.grad_bytes)),
            root_grad[index],
            carried[index],
        )
        for index, s in enumerate(kept)
    ]

    def growth(index: int, period: int) -> tuple[int, ...]:
        return tuple(after - before for after, before in zip(values[index], values[index - period], strict=True))

    chosen: list[int] = []
    index = 0
    while index < len(kept):
        length, period = 1, 1
        for tried in range(1, LONGEST_PERIOD + 1):
            end = index + tried
            while end < len(kept) and keys[end] == keys[end - tried]:
                steady = end - tried < index + tried or growth(end, tried) == growth(end - tried, tried)
                if not steady:
                    break
                end += 1
            if end - index > max(length, 4 * tried):
                length, period = end - index, tried
                break
        run = range(index, index + length)
        ends = 2 * period
        chosen += run if length <= 2 * ends else [*run[:ends], *run[-ends:]]
        index += length
    return chosen


def unit_kinds(trace: Trace) -> tuple[int, ...]:
    """By unit: the first unit of the same shape. Units of one kind hold, gather and reduce the same. Remembered per trace."""
    found = _kinds.get(id(trace))
    if found is None or found[0] is not trace:
        if len(_kinds) > 256:
            _kinds.clear()
        first: dict[object, int] = {}
        numbers = tuple(first.setdefault(_unit_shape(unit), index) for index, unit in enumerate(trace.units))
        found = _kinds[id(trace)] = (trace, numbers)
    return found[1]


_kinds: dict[int, tuple[Trace, tuple[int, ...]]] = {}


def _unit_shape(unit: Unit) -> object:
    """All of a unit's parameters that bytes depend on."""
    return tuple((p.shape, p.dtype_bytes, p.trainable, p.tp_dim, p.stored_bytes) for p in unit.params)


def stages_of(trace: Trace, pp: int) -> list[int]:
    """The pipeline stage of each segment: blocks by the cut, other parts with the block that follows them in forward."""
    cuts = block_cut(len(trace.blocks), pp)
    of_unit = {unit: stage for stage, cut in enumerate(cuts) for unit in cut}
    stages = [of_unit.get(segment.unit, -1) for segment in trace.segments]
    forward = [index for index, segment in enumerate(trace.segments) if segment.phase == "forward"]
    backward = [index for index, segment in enumerate(trace.segments) if segment.phase == "backward"]
    for order in (forward[::-1], backward):
        current = pp - 1
        for index in order:
            if stages[index] < 0:
                stages[index] = current
            current = stages[index]
    for order in (forward, backward[::-1]):  # before the first block: the first stage
        for index in order:
            if trace.segments[index].unit:
                break
            stages[index] = 0 if len(trace.blocks) else stages[index]
    return stages


def _visits(kept: list[Segment]) -> tuple[Visits, Visits]:
    """Of the segments themselves, and of what was over before each."""
    order, upto, before, since, again = [-1], [], [], [], []
    seen: set[int] = set()
    start, phase = 0, ""
    for segment in kept:
        if segment.phase != phase:
            start, phase, seen = len(order) - 1, segment.phase, set()
        before.append(len(order) - 1)
        again.append(segment.unit if segment.unit in seen else -1)
        if segment.unit and segment.unit not in seen:
            seen.add(segment.unit)
            order.append(segment.unit)
        upto.append(len(order) - 1)
        since.append(start)
    units, low = np.array(order), np.array(since)
    repeated = np.array(again) if any(unit >= 0 for unit in again) else None
    return Visits(units, np.array(upto), low, None), Visits(units, np.array(before), low, repeated)


def _neighbours(kept: list[Segment]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    before, coming, reduced = [], [], []
    following = -1
    for segment in reversed(kept):
        coming.append(following if segment.phase == "backward" else -1)
        if segment.unit and segment.phase == "backward":
            following = segment.unit
    coming.reverse()
    gathered, last_reduced = 0, -1
    for segment in kept:
        before.append(gathered)
        reduced.append(last_reduced if segment.phase == "backward" else -1)
        if segment.unit:
            if segment.phase == "forward":
                gathered = segment.unit
            else:
                last_reduced = segment.unit
    return np.array(before), np.array(coming), np.array(reduced)
