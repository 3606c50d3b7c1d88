"""One rank that asks PyTorch's caching allocator for memory: what it makes and lets go, in time order."""

from __future__ import annotations

from collections.abc import Sequence

from dsplan.planner.memory.allocator import SMALL
from dsplan.planner.memory.kept_inputs import as_run
from dsplan.planner.memory.native_widths import widths
from dsplan.planner.memory.replay import block_cut
from dsplan.planner.memory.shards import local_numel
from dsplan.schemas.optimizer import on_shards
from dsplan.schemas.plan import Plan
from dsplan.schemas.trace import SPLIT_ACTIVATION, Trace
from dsplan.schemas.units import PRECISION_BYTES

FP32 = 4
COMPUTE, GATHER, REDUCE = range(3)
"""Streams. What is made on one is never reused on another."""
Event = tuple[int, int, int, int]
"""(storage, bytes, label, module)"""
STEPS = 2
"""The second one meets what the first has left: its states are made late, and its cache is full."""


class AskingRank:
    """One rank's requests, appended in time order. Storages of the trace are numbered anew in each pass."""

    def __init__(self, trace: Trace, plan: Plan):
        self.trace, self.plan, self.knobs = as_run(trace, plan), plan, plan.knobs
        self.width = PRECISION_BYTES[plan.precision]
        self.events: list[tuple[int, int]] = []
        self.streams: dict[int, int] = {}
        self.serial = 0
        self.params = trace.all_params
        self.sizes = [local_numel(param, plan.layout.tp) for param in self.params]
        native = plan.layout.dp_shard if plan.zero_stage else 1
        self.degree = max(1, native if plan.engine == "native" else plan.layout.dp)
        self.unit_of: list[int] = [unit for unit, held in enumerate(trace.units) for _ in held.params]
        self.here = self._units_here()
        self.held = [index for index, unit in enumerate(self.unit_of) if unit in self.here]
        self.trained = [index for index in self.held if self.params[index].trainable]

    def make(self, size: int, stream: int = 0) -> tuple[int, int]:
        self.serial += 1
        if stream:
            self.streams[self.serial] = stream
        self.events.append((self.serial, size))
        return self.serial, size

    def drop(self, made: tuple[int, int]) -> None:
        self.events.append((made[0], -made[1]))

    def passing(self, sizes: Sequence[int], stream: int = COMPUTE) -> None:
        """Made one after the other, then all let go."""
        for made in [self.make(size, stream) for size in sizes]:
            self.drop(made)

    def shard(self, index: int) -> int:
        """Elements of one parameter on one rank."""
        return -(-self.sizes[index] // self.degree)

    def _units_here(self) -> frozenset[int]:
        """Units of the first pipeline stage, which keeps the most micro-batches."""
        cut = block_cut(len(self.trace.blocks), self.plan.layout.pp)[0]
        return frozenset((0, *cut))

    def segments(self) -> list[tuple[int, bool, list[Event]]]:
        """(unit, backward, events) of the segments that this rank runs; without what fills less than a small block.

        tp divides what it divides.
        """
        events, tp = self.trace.events, self.plan.layout.tp
        label, large = events.label, _large(self.trace)
        bounds = [segment.first_event for segment in self.trace.segments] + [len(events)]
        bounds[0] = 0  # inputs
        found = []
        for place, segment in enumerate(self.trace.segments):
            if segment.unit not in self.here:
                continue
            kept = [
                (storage, delta, label[storage], module)
                for storage, delta, module in zip(
                    events.storage[bounds[place] : bounds[place + 1]],
                    events.delta_bytes[bounds[place] : bounds[place + 1]],
                    events.module[bounds[place] : bounds[place + 1]],
                    strict=True,
                )
                if large[storage] and (delta or label[storage] >= 0)
            ]
            if tp > 1:
                kept = [(storage, self.local(delta, told), told, module) for storage, delta, told, module in kept]
            found.append((segment.unit, segment.phase == "backward", kept))
        return found

    def local(self, delta: int, label: int) -> int:
        """What one tp rank holds of it."""
        if label >= 0:
            whole = self.params[label].numel
            return delta * self.sizes[label] // whole if whole else delta
        return int(delta / self.plan.layout.tp) if label == SPLIT_ACTIVATION else delta


def _large(trace: Trace) -> list[bool]:
    """By storage: whether it is ever larger than a small block. The small pool is too small to matter."""
    events = trace.events
    large = [False] * len(events.label)
    for storage, delta in zip(events.storage, events.delta_bytes, strict=True):
        if delta > SMALL:
            large[storage] = True
    return large


class Running:
    """The trace's storages of one micro-batch in the stream of requests."""

    def __init__(self, requests: AskingRank):
        self.requests = requests
        self.numbers: dict[int, tuple[int, int]] = {}

    def change(self, storage: int, delta: int) -> None:
        requests = self.requests
        held = self.numbers.get(storage)
        if held is None:
            if delta > 0:
                self.numbers[storage] = requests.make(delta)
            return
        left = held[1] + delta
        requests.events.append((held[0], delta if left > 0 else -held[1]))
        if left > 0:
            self.numbers[storage] = held[0], left
        else:
            del self.numbers[storage]

    def let_go(self, storage: int) -> None:
        held = self.numbers.pop(storage, None)
        if held is not None:
            self.requests.drop(held)

    def end(self) -> None:
        for storage in list(self.numbers):
            self.let_go(storage)


def optimizer_temporaries(requests: AskingRank, sizes: Sequence[int]) -> None:
    """Temporaries, in the masters' type, of the optimizer over tensors of these elements."""
    optimizer, width = requests.plan.optimizer, FP32
    if requests.plan.engine == "native":
        optimizer, width = on_shards(optimizer), widths(requests.plan).master
    if optimizer.kernel == "foreach" and optimizer.states:
        requests.passing([width * size for size in sizes])
    elif optimizer.kernel == "for-loop" and optimizer.states:
        for size in sizes:
            requests.passing([width * size, width * size])
