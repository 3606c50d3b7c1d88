"""What comes and goes under FSDP2 while one micro-batch runs forward and backward, laid over the trace.

Source: torch 2.13, torch/distributed/fsdp/_fully_shard/{_fsdp_param_group,_fsdp_collectives,_fsdp_param}.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from dsplan.planner.memory.native_widths import Widths
from dsplan.planner.memory.replay import END, Bytes, Layer, Timeline, items_at, one_gradient
from dsplan.planner.memory.shards import Shards
from dsplan.schemas.layout import PARTIAL, ZERO
from dsplan.schemas.ledger import MemoryItem, Phase
from dsplan.schemas.trace import Trace
from dsplan.schemas.units import count, size

FP32 = 4
Held = TypeVar("Held", int, Bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """All of a plan that what comes and goes depends on. accumulation: 1, 2, or 3 for more; degree: the shards."""

    zero_stage: int
    degree: int
    tp: int
    sequence_parallel: bool
    sp: int
    accumulation: int
    replicated: bool
    """Gradients are all-reduced between copies of the shards: at stage 0, and under hybrid sharding."""
    widths: Widths
    on_host: frozenset[int] = frozenset()
    """Units whose reduced gradients go to the host at once."""


@dataclass(frozen=True, slots=True)
class Peak:
    """The fullest row of one phase, without what is there all the time."""

    where: str
    activation_bytes: int
    activation_why: str
    items: tuple[MemoryItem, ...]

    @property
    def total_bytes(self) -> int:
        return self.activation_bytes + sum(item.bytes for item in self.items)


@dataclass(frozen=True, slots=True)
class _Pass:
    """Where in the accumulation a micro-batch stands: gathers come with the first, reductions wait for the last."""

    first: bool
    last: bool


_ONLY, _FIRST, _MIDDLE, _LAST = _Pass(True, True), _Pass(True, False), _Pass(False, False), _Pass(False, True)
_PASSES = {1: (_ONLY,), 2: (_FIRST, _LAST), 3: (_FIRST, _MIDDLE, _LAST)}


def passing_peaks(trace: Trace, timeline: Timeline, sizes: Shards, way: Way) -> dict[Phase, Peak]:
    """The peaks of forward, backward and of an evaluation's forward; remembered per trace."""
    key = (id(trace), timeline.pp, timeline.pp_stage, way)
    found = _remembered.get(key)
    if found is None or found[0] is not trace:
        if len(_remembered) > 100_000:
            _remembered.clear()
        found = _remembered[key] = (trace, _Passes(trace, timeline, sizes, way).peaks())
    return found[1]


_remembered: dict[tuple[int, int, int, Way], tuple[Trace, dict[Phase, Peak]]] = {}


def divided(whole: Held, split: Held, way: Way) -> Held:
    """Activations of one rank: tp divides the split part, and all of it where it splits the sequence too.

    Source: Korthikanti et al. 2022 (arXiv:2205.05198), equations 2 and 4; Jacobs et al. 2023 (arXiv:2309.14509) for sp.
    """
    if way.tp > 1:
        rest = whole - split
        whole = (-(-rest // way.tp) if way.sequence_parallel else rest) + -(-split // way.tp)
    return whole if way.sp == 1 else -(-whole // way.sp)


class _Passes:
    """One rank of one pipeline stage."""

    def __init__(self, trace: Trace, timeline: Timeline, sizes: Shards, way: Way):
        self.trace, self.timeline, self.sizes, self.way = trace, timeline, sizes, way
        self.width, self.master, self.reduce = way.widths.compute, way.widths.master, way.widths.reduce
        self.mixed = self.width != self.master
        # modules run on the masters, and what is reduced is the gradient
        self.in_place = way.zero_stage == 0 and not way.on_host
        units = list(timeline.units)
        self.trainable = int(sizes.trainable[units].sum())
        self.trainable_shard = int(sizes.trainable_shard[units].sum())
        unit, numbers = timeline.unit, np.arange(len(timeline.unit))
        self.block = np.where(unit > 0, unit, -1)
        self.first, self.ends = numbers == 0, numbers == len(unit) - 1
        self.by_unit = sizes.gathered_bytes
        self.quantized = bool(sizes.stored[units].any())
        self.done_elements = timeline.block_done @ sizes.trainable
        self.done_shards = np.where(timeline.backward, timeline.block_done @ sizes.trainable_shard, 0)
        staying = sizes.trainable_shard.copy()  # on the device
        staying[list(way.on_host)] = 0
        self.staying = int(staying[units].sum())
        self.done_staying = np.where(timeline.backward, timeline.block_done @ staying, 0)

    def peaks(self) -> dict[Phase, Peak]:
        timeline, way = self.timeline, self.way
        activations = divided(timeline.activation, timeline.split, way)
        backward = timeline.backward[timeline.segment]
        best: dict[Phase, Peak] = {}
        most: dict[Phase, int] = {}

        def keep(phase: Phase, where: str, held: Bytes, layers: list[Layer], total: Bytes, text: str) -> None:
            row = int(total.argmax())
            if phase in most and int(total[row]) <= most[phase]:
                return
            most[phase] = int(total[row])
            segment, kind = int(timeline.segment[row]), int(timeline.kind[row])
            place = f"{('before ', '', 'after ')[kind]}{where} of {timeline.names[segment]}"
            best[phase] = Peak(place, int(held[row]), text + self._split_text(row), items_at(layers, row))

        for pass_ in _PASSES[way.accumulation]:
            gathered = self.gathered(pass_)
            layers = [*gathered, *self.gradients(pass_)]
            total = _sum(activations, layers)
            if not backward.all():
                keep("forward", "forward", activations, layers, np.where(backward, -1, total), "traced ")
            if backward.any():
                keep("backward", "backward", activations, layers, np.where(backward, total, -1), "traced ")
            if pass_ is _ONLY or pass_ is _FIRST:
                alone = divided(timeline.alone, np.minimum(timeline.split, timeline.alone), way)
                total = np.where(backward, -1, _sum(alone, gathered))
                keep("eval", "forward without saved tensors", alone, gathered, total, "at most ")
        return best

    def _split_text(self, row: int) -> str:
        text, way = size(int(self.timeline.activation[row])), self.way
        if way.tp > 1:
            part = "all" if way.sequence_parallel else size(int(self.timeline.split[row]))
            text += f", of which {part} / tp {way.tp}"
        return text + (f", / sp {way.sp}" if way.sp > 1 else "")

    def gathered(self, pass_: _Pass) -> list[Layer]:
        """Unsharded copies in the compute dtype, and the flat buffers they are copied out of."""
        held, width, degree = self.whole_copies(pass_, self.by_unit), self.width, self.way.degree
        layers = []
        if self.quantized:
            bytes_ = self.whole_copies(pass_, degree * self.sizes.stored_shard_bytes)
            numel = self.whole_copies(pass_, degree * self.sizes.stored_shard)
            held = held - bytes_

            def stored(row: int) -> str:
                each, many = int(bytes_[row]) / max(1, int(numel[row])), count(int(numel[row]))
                return f"as stored: {each:.3g} B x {many} params gathered"

            if not self.in_place:
                layers.append(Layer("gathered_params", bytes_, stored))
        if self.in_place and not self.mixed:
            return []
        floats = Layer(
            "gathered_params", held, lambda row: f"{width} B x {count(int(held[row]) // width)} params gathered"
        )
        return [floats, *layers, *(self.flat_buffers(pass_) if degree > 1 else self.casts(pass_))]

    def whole_copies(self, pass_: _Pass, by_unit: Bytes) -> Bytes:
        """By row: what is unsharded of by_unit."""
        timeline = self.timeline
        backward = timeline.backward
        everything = int(by_unit[list(timeline.units)].sum())
        visited = timeline.block_visits @ by_unit
        root = int(by_unit[0]) if 0 in timeline.units else 0
        if self.way.zero_stage == 3:  # a block is dropped after use
            during = root + by_unit[self.block]
            after = np.where(self.ends & pass_.last, 0, root)
        elif not pass_.last:  # all kept for the next micro-batch
            seen = root + visited if pass_.first else everything
            during = after = np.where(backward, everything, seen)
        else:  # each kept until its own backward is over
            seen = root + visited if pass_.first else everything
            during = np.where(backward, everything - timeline.block_done @ by_unit, seen)
            # what lies outside the blocks is reduced and dropped at the very end
            after = np.where(backward, during - by_unit[self.block] - root * self.ends, during)
        return timeline.rows(during, during, after)

    def casts(self, pass_: _Pass) -> list[Layer]:
        """Without shards to gather, each parameter is cast and copied, one after the other."""
        again = self.way.zero_stage == 3
        if not self.mixed or not (pass_.first or again):
            return []
        timeline = self.timeline
        block = timeline.unit > 0
        gathers = (block & (again | ~timeline.backward)) | (self.first & pass_.first)
        excess = self.width * np.where(gathers, self.sizes.cast_excess[timeline.unit], 0)
        return [Layer("temporary", timeline.rows(excess, 0, 0), f"{self.width} B cast of one parameter")]

    def flat_buffers(self, pass_: _Pass) -> list[Layer]:
        """All-gather outputs. Forward frees one after the next is there; backward fetches the next block ahead."""
        stage3 = self.way.zero_stage == 3
        if not stage3 and not pass_.first:
            return []  # still gathered from the first micro-batch
        timeline, by_unit, degree = self.timeline, self.by_unit, self.way.degree
        unit, backward = timeline.unit, timeline.backward
        opens = self.first & (unit == 0)
        mine = np.where(opens & pass_.first, by_unit[0], by_unit[self.block])  # what this segment gathers
        before = timeline.gathered_before
        if not pass_.first:  # the parts outside the blocks are gathered still
            before = np.where(before, before, -1)
        previous = np.where(self.first, 0, by_unit[before])
        cast = -(-mine // degree) if self.mixed else np.zeros_like(mine)
        # A block begins: its buffer beside the previous one, which is let go after the copies are made.
        start = previous + np.maximum(mine, cast)
        # The model's forward ends with the last block's buffer; what follows it, such as a loss outside, does not see it.
        closing, inside = (unit == 0) & ~opens, self.trace.loss_inside
        start, during = np.where(closing, previous, start), np.where(closing, previous if inside else 0, mine)
        if stage3:
            ahead = by_unit[timeline.next_block]
            cast = -(-ahead // degree) if self.mixed else np.zeros_like(ahead)
            start = np.where(backward, np.where(unit > 0, np.maximum(mine, ahead + cast), 0), start)
            during = np.where(backward, ahead, during)
        else:  # still gathered from forward
            start, during = np.where(backward, 0, start), np.where(backward, 0, during)
        held = timeline.rows(start, during, during)
        if not inside:  # the first block is fetched when the model's output has its gradient, after the loss
            opening = int(backward.argmax())
            if unit[opening] == 0:
                held[(timeline.segment == opening) & (timeline.grad == 0)] = 0
        width = self.width

        def why(row: int) -> str:
            number = int(held[row])
            product = size(number) if self.quantized else f"{width} B x {count(number // width)} params"
            return f"{product} in all-gather buffers"

        return [Layer("gathered_params", held, why)]

    def gradients(self, pass_: _Pass) -> list[Layer]:
        """Full-size gradients until reduced, the reduction's buffers, and the fp32 shards that it leaves."""
        sizes, timeline, width = self.sizes, self.timeline, self.width
        unit, backward = timeline.unit, timeline.backward
        waits = ZERO[self.way.zero_stage].grad is PARTIAL  # unreduced sums until the boundary
        reduces = pass_.last or not waits
        layers = []

        sums = waits and not pass_.first
        cast = self.reduce != width  # what waits does so in the type that is sent
        own = self.own_gradients(sums and not cast)
        if sums:  # they go as their unit is reduced
            left = np.where(backward, self.trainable - self.done_elements * pass_.last, self.trainable)
            partial = self.reduce * left[timeline.segment]

            def summed(row: int) -> str:
                each = self.reduce
                return f"summed over micro-batches before reducing: {each} B x {count(int(partial[row]) // each)}"

            layers.append(Layer("grads", partial, summed))
        elif waits and not pass_.last:
            own = own + np.where(backward, self.reduce * self.done_elements, 0)[timeline.segment]
            if cast:  # one parameter after the other, when its unit is done
                casting = self.reduce * sizes.trainable + width * (sizes.last_trained - sizes.trainable)
                done = backward & ((unit > 0) | self.ends)
                own = own + timeline.rows(0, 0, np.where(done, np.maximum(0, casting[unit]), 0))
        layers.append(
            Layer("grads", own, f"{width} B full-size gradients of the unit that runs, and outside the blocks")
        )
        if reduces:
            # what leaves for the host is the reduction's output, counted below
            reduced = np.full_like(unit, self.staying) if not waits and not pass_.first else self.done_staying
            type_ = "fp32" if self.master == FP32 else "bf16"
            why = f"{type_}: {self.master} B x params reduced so far, of {count(self.trainable)}{self._per_shard()}"
            layers.append(Layer("grads", self.master * reduced[timeline.segment], why))
            # reducing: the full gradients beside the new flat input; then that beside its output, the output in the masters'
            # type, and the last gradient, which the loop variable of foreach_reduce still holds
            new = np.where(backward & ((unit > 0) | self.ends), unit, -1)
            held = self.reduce if sums else width
            output = (self.reduce + (self.master if self.master != self.reduce else 0)) * sizes.trainable_shard[new]
            if self.way.degree > 1:
                output = output + held * sizes.last_trained[new]
            elif self.in_place:  # the output is the input
                output = output - self.reduce * sizes.trainable_shard[new]
            full = self.grads_of(sums)
            reducing = self.reduce * sizes.trainable_padded[new] + np.maximum(0, output - full)
            # the input of the last reduction; in place it is the gradient itself, or counted among the all-reduce buffers
            previous = 0 if self.in_place else self.reduce * sizes.trainable_padded[timeline.reduced_before]
            if sums and cast:  # the unit's own gradients are in the sum, and gone, before it is reduced
                reducing = np.maximum(previous, reducing - self.grads_of(False))
            buckets = timeline.rows(previous, previous, np.where(new >= 0, reducing, previous))
            why = f"{self.reduce} B flat input of the reduction, kept until the next one"
            layers.append(Layer("buckets", buckets, why))
        if self.way.replicated and self.reduce != self.master and pass_.last:
            kept = self.reduce * self.done_shards[timeline.segment]
            layers.append(Layer("buckets", kept, f"{self.reduce} B all-reduce buffers, kept until backward ends"))
        return layers

    def _per_shard(self) -> str:
        return f" params / dp {self.way.degree}" if self.way.degree > 1 else " params"

    def own_gradients(self, summed: bool) -> Bytes:
        """By row: full-size gradients of the running unit and of the parts outside the blocks.

        summed: each is added at once to a sum that exists already.
        """
        own, outside = self.whole_gradients()
        if not summed:
            return own + outside
        width, sizes = self.width, self.sizes
        return one_gradient(self.timeline, own, outside, width * sizes.largest_by_unit, width * sizes.trainable)

    def whole_gradients(self) -> tuple[Bytes, Bytes]:
        """By row: full-size gradients of the running unit; of the parts outside the blocks while a block runs."""
        timeline = self.timeline
        own, outside = timeline.grad, timeline.root_grad[timeline.segment]
        if self.way.tp > 1:
            ratio = self.sizes.ratio
            own = np.ceil(own * ratio[timeline.unit[timeline.segment]]).astype(np.int64)
            outside = np.ceil(outside * ratio[0]).astype(np.int64)
        return own, outside

    def grads_of(self, summed: bool) -> Bytes:
        """By segment: full-size gradients of its unit at its end."""
        timeline = self.timeline
        if summed:
            found: Bytes = self.reduce * self.sizes.trainable[timeline.unit]
            return found
        ends = timeline.kind == END
        whole: Bytes = self.whole_gradients()[0][ends]  # rows go by segment, so its ends do too
        return whole


def _sum(held: Bytes, layers: list[Layer]) -> Bytes:
    total: Bytes = held.copy()
    for layer in layers:
        total += layer.bytes
    return total
