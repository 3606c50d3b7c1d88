"""The trace as rows: every moment that can be a peak, for one pipeline stage. Engines lay their own bytes over it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from dsplan.schemas.layout import Layout
from dsplan.schemas.ledger import Category, MemoryItem, Moment, Phase
from dsplan.schemas.trace import Segment, Trace
from dsplan.schemas.units import size
from numpy.typing import NDArray

Bytes = NDArray[np.int64]
START, DURING, END = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Timeline:
    """Rows of one pipeline stage. A segment has a START row, a DURING row per point, and an END row.

    START and END are the moments in which the engine works around the segment (gathers before, reduces after).
    Arrays by row: segment, kind, activation, split, grad. Arrays by segment: unit, backward, and neighbours as unit
    indices, -1 where there is none.
    """

    pp_stage: int
    units: tuple[int, ...]
    """Units that this stage holds: the blocks of its cut, and 0 where it holds parts outside the blocks."""
    segment: NDArray[np.int64]
    kind: NDArray[np.int64]
    place: NDArray[np.int64]
    """kind x segments + segment."""
    activation: Bytes
    """Of one micro-batch of this stage alone."""
    split: Bytes
    grad: Bytes
    saved_bytes: int
    """Activations that one more micro-batch in flight keeps; `saved_split_bytes` is the part that tp divides."""
    saved_split_bytes: int
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
    block_visits: NDArray[np.int64]
    """[segment, unit] -> 1 where that block's forward (or backward) began before or in this segment."""
    block_done: NDArray[np.int64]
    """[segment, unit] -> 1 where that block's forward (or backward) ended before this segment."""
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


def peaks(timeline: Timeline, layers: list[Layer]) -> list[Moment]:
    """The fullest row of forward and of backward, as moments."""
    total = np.zeros(len(timeline.segment), dtype=np.int64)
    for layer in layers:
        total += layer.bytes
    backward = timeline.backward[timeline.segment]
    moments = []
    phases: tuple[tuple[Phase, NDArray[np.bool_]], ...] = (("forward", ~backward), ("backward", backward))
    for phase, mask in phases:
        if mask.any():
            row = int(np.argmax(np.where(mask, total, -1)))
            segment, kind = int(timeline.segment[row]), int(timeline.kind[row])
            where = f"{('before ', '', 'after ')[kind]}{phase} of {timeline.names[segment]}"
            moments.append(Moment(phase=phase, where=where, items=items_at(layers, row)))
    return moments


def items_at(layers: list[Layer], row: int) -> tuple[MemoryItem, ...]:
    """The layers that hold bytes at that row, as ledger items."""
    items = []
    for layer in layers:
        held = layer.bytes if isinstance(layer.bytes, int) else int(layer.bytes[row])
        if held:
            why = layer.why if isinstance(layer.why, str) else layer.why(row)
            items.append(MemoryItem(category=layer.category, bytes=held, why=why))
    return tuple(items)


def activation_layer(timeline: Timeline, layout: Layout, accumulation: int) -> Layer:
    """Activations of the running micro-batch, and of those that wait in the pipeline.

    1F1B keeps min(pp - pp_stage, micro-batches) in flight. Source: Narayanan et al. 2021 (arXiv:2104.04473), section 2.2.
    """
    waiting = min(layout.pp - timeline.pp_stage, accumulation) - 1
    tp = layout.tp

    def divided(whole: Bytes, split: Bytes) -> Bytes:
        return whole if tp == 1 else whole - split + -(-split // tp)

    saved = timeline.saved_bytes - timeline.saved_split_bytes + -(-timeline.saved_split_bytes // tp)
    held = divided(timeline.activation, timeline.split) + waiting * saved

    def why(row: int) -> str:
        text = f"traced {size(int(timeline.activation[row]))}"
        if tp > 1:
            text += f", of which {size(int(timeline.split[row]))} / tp {tp}"
        return text + (f", + {waiting} micro-batches in flight x {size(saved)}" if waiting else "")

    return Layer("activations", held, why)


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
        stages = tuple(_timeline(trace, pp, stage) for stage in range(pp)) if trace.segments else ()
        found = _remembered[key] = (trace, stages)
    return found[1]


_remembered: dict[tuple[int, int], tuple[Trace, tuple[Timeline, ...]]] = {}


def block_cut(blocks: int, pp: int) -> list[range]:
    """Contiguous cut of the blocks into pp parts; the first ones are longer by one where it does not divide."""
    short, longer = divmod(blocks, pp)
    bounds = [stage * short + min(stage, longer) for stage in range(pp + 1)]
    return [range(1 + low, 1 + high) for low, high in itertools.pairwise(bounds)]


def _timeline(trace: Trace, pp: int, pp_stage: int) -> Timeline:
    cut = block_cut(len(trace.blocks), pp)[pp_stage]
    kept = [segment for segment, stage in zip(trace.segments, _stage_of(trace, pp), strict=True) if stage == pp_stage]
    first_forward = next(segment for segment in kept if segment.phase == "forward")
    last_forward = [segment for segment in kept if segment.phase == "forward"][-1]
    base, base_split, boundary = 0, 0, 0
    if pp_stage:
        # what earlier stages saved is theirs; this stage receives its input, as large as that of the first block
        first_block = next(s for s in trace.segments if s.unit and s.phase == "forward")
        base, base_split = first_forward.start.activation_bytes, first_forward.start.split_bytes
        boundary = first_block.start.activation_bytes
    points = []
    for index, segment in enumerate(kept):
        points.append((index, START, segment.start))
        points += [(index, DURING, point) for point in segment.points]
        points.append((index, END, segment.end))
    held_root = 0
    root_grad, carried = [], []
    for segment in kept:
        outside = segment.phase == "backward" and segment.unit == 0
        # what lies outside the blocks keeps its gradients to the end, also those that the trace lets go between
        carried.append(max(0, held_root - segment.start.grad_bytes) if outside else 0)
        root_grad.append(0 if outside else held_root)
        held_root = segment.end.grad_bytes + carried[-1] if outside else held_root
    unit = np.array([segment.unit for segment in kept], dtype=np.int64)
    backward = np.array([segment.phase == "backward" for segment in kept])
    gathered_before, next_block, reduced_before = _neighbours(kept)
    visits = np.zeros((len(kept), len(trace.units) + 1), dtype=np.int64)
    done = np.zeros_like(visits)
    for index, segment in enumerate(kept):
        if index and kept[index - 1].phase == segment.phase:
            visits[index] = visits[index - 1]
            done[index] = visits[index - 1]
        if segment.unit:
            visits[index, segment.unit] = 1
            done[index, segment.unit] = 0
    return Timeline(
        pp_stage=pp_stage,
        units=((0,) if pp_stage in (0, pp - 1) else ()) + tuple(cut),
        segment=np.array([index for index, _, _ in points], dtype=np.int64),
        kind=np.array([kind for _, kind, _ in points], dtype=np.int64),
        place=np.array([kind * len(kept) + index for index, kind, _ in points], dtype=np.int64),
        activation=np.array([p.activation_bytes - base + boundary for _, _, p in points], dtype=np.int64).clip(min=0),
        split=np.array([p.split_bytes - base_split for _, _, p in points], dtype=np.int64).clip(min=0),
        grad=np.array([point.grad_bytes + carried[index] for index, _, point in points], dtype=np.int64),
        saved_bytes=max(0, last_forward.end.activation_bytes - base + boundary),
        saved_split_bytes=max(0, last_forward.end.split_bytes - base_split),
        names=tuple(trace.units[s.unit].name or "the parts outside the blocks" for s in kept),
        unit=unit,
        backward=backward,
        gathered_before=gathered_before,
        next_block=next_block,
        reduced_before=reduced_before,
        block_visits=visits,
        block_done=done,
        root_grad=np.array(root_grad, dtype=np.int64),
    )


def _stage_of(trace: Trace, pp: int) -> list[int]:
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


def _neighbours(kept: list[Segment]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    before, coming, reduced = [], [], []
    gathered, last_reduced = 0, -1
    for index, segment in enumerate(kept):
        before.append(gathered)
        reduced.append(last_reduced if segment.phase == "backward" else -1)
        later = (
            [s.unit for s in kept[index + 1 :] if s.phase == "backward" and s.unit]
            if segment.phase == "backward"
            else []
        )
        coming.append(later[0] if later else -1)
        if segment.unit:
            if segment.phase == "forward":
                gathered = segment.unit
            else:
                last_reduced = segment.unit
    return np.array(before), np.array(coming), np.array(reduced)
