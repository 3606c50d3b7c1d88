"""What an engine asks of the allocator in two steps, request by request: for how it fragments, not for how much it is.

The bytes are the ledger's; these requests have the sizes and lifetimes that decide how well they fit into each other. Where
nothing is traced there are none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsplan.planner.memory.allocator import SMALL, Reserved, replay
from dsplan.planner.memory.replay import block_cut
from dsplan.planner.memory.shards import local_numel
from dsplan.schemas.optimizer import on_shards
from dsplan.schemas.plan import Plan
from dsplan.schemas.trace import SPLIT_ACTIVATION, Param, Trace
from dsplan.schemas.units import PRECISION_BYTES

FP32 = 4
COMPUTE, GATHER, REDUCE = range(3)
"""Streams. What is made on one is never reused on another."""
_Event = tuple[int, int, int, int]
"""(storage, bytes, label, module)"""
STEPS = 2
"""The second one meets what the first has left: its states are made late, and its cache is full."""


@dataclass(frozen=True, slots=True)
class Requests:
    """Time-ordered (storage, bytes) of two steps, and the streams of storages that are not made on the first one."""

    events: list[tuple[int, int]]
    streams: dict[int, int]

    def replay(self, *, expandable: bool = False, limit_bytes: int | None = None) -> Reserved:
        return replay(self.events, streams=self.streams, expandable=expandable, limit_bytes=limit_bytes)


def recorded(events: Sequence[tuple[int, int]], resident: int) -> Requests:
    """Those of a rehearsed step, twice. The first `resident` events are of what is there before it and after it."""
    held: dict[int, int] = {}
    for storage, delta in events[:resident]:
        held[storage] = held.get(storage, 0) + delta
    whole = list(events[:resident])
    for _ in range(STEPS):
        sizes = dict(held)
        for storage, delta in events[resident:]:
            sizes[storage] = sizes.get(storage, 0) + delta
        whole += events[resident:]
        whole += [(storage, held.get(storage, 0) - size) for storage, size in sizes.items()]
    return Requests([event for event in whole if event[1]], {})


def requests_of(trace: Trace, plan: Plan) -> Requests | None:
    """What a rank of the first pipeline stage asks for; None where nothing is traced."""
    if not trace.segments or not len(trace.events):
        return None
    rank = _Rank(trace, plan)
    (_native if plan.engine == "native" else _deepspeed)(rank)
    return Requests(rank.events, rank.streams)


def loads_into_cache(plan: Plan) -> bool:
    """Whether the whole model was on the device, and what it took stays cached: nobody empties the cache after it.

    Where shards stay on the device, DeepSpeed does. Source: deepspeed/runtime/zero/utils.py, defragment.
    """
    return plan.engine == "deepspeed" and plan.zero_stage == 3 and plan.offload == "param" and plan.built == "host"


class _Rank:
    """One rank's requests, appended in time order. Storages of the trace are numbered anew in each pass."""

    def __init__(self, trace: Trace, plan: Plan):
        self.trace, self.plan, self.knobs = trace, plan, plan.knobs
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

    def segments(self) -> list[tuple[int, bool, list[_Event]]]:
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
                if large[storage]
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


class _Running:
    """The trace's storages of one micro-batch in the stream of requests."""

    def __init__(self, requests: _Rank):
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


def _optimizer_temporaries(requests: _Rank, sizes: Sequence[int]) -> None:
    """fp32 temporaries of the optimizer over tensors of these elements."""
    optimizer = requests.plan.optimizer
    if requests.plan.engine == "native":
        optimizer = on_shards(optimizer)
    if optimizer.kernel == "foreach" and optimizer.states:
        requests.passing([FP32 * size for size in sizes])
    elif optimizer.kernel == "for-loop" and optimizer.states:
        for size in sizes:
            requests.passing([FP32 * size, FP32 * size])


# FSDP2: one all-gather buffer and one tensor per parameter and block; one reduction buffer per block


def _native(requests: _Rank) -> None:
    plan, width = requests.plan, requests.width
    shards = [requests.shard(index) for index in requests.held]
    trained = [requests.shard(index) for index in requests.trained]
    if plan.offload != "param":
        for size in shards:
            requests.make(FP32 * size)
    mixed = width < FP32
    gathers = (requests.degree > 1 and plan.zero_stage > 0) or mixed
    again = plan.zero_stage == 3
    segments = requests.segments()
    by_unit: dict[int, list[int]] = {}
    for index in requests.held:
        by_unit.setdefault(requests.unit_of[index], []).append(index)
    last_backward = max((place for place, segment in enumerate(segments) if segment[1]), default=-1)
    for step in range(STEPS):
        gathered: dict[int, list[tuple[int, int]]] = {}
        running = _Running(requests)
        flat: tuple[int, int] | None = None
        reducing: tuple[int, int] | None = None
        shards_of_grads: list[tuple[int, int]] = []
        grads: dict[int, list[int]] = {}

        def gather(unit: int, gathered: dict[int, list[tuple[int, int]]] = gathered) -> tuple[int, int] | None:
            if unit in gathered or not gathers:
                return None
            members = by_unit.get(unit, [])
            buffer = requests.make(width * sum(requests.sizes[index] for index in members), GATHER)
            gathered[unit] = [requests.make(width * requests.sizes[index]) for index in members]
            return buffer

        for place, (unit, backward, events) in enumerate(segments):
            if place == 0 and unit:
                buffer = gather(0)
                if buffer:
                    requests.drop(buffer)
            ahead = [segment[0] for segment in segments[place + 1 : place + 3] if segment[1] and segment[0]]
            for wanted in [unit, *(ahead[:1] if backward and again else [])]:
                buffer = gather(wanted)
                if buffer:
                    if flat:
                        requests.drop(flat)
                    flat = buffer
            for storage, delta, label, _ in events:
                if label >= 0 and delta < 0:
                    continue  # the engine decides
                if label >= 0 and delta > 0:
                    grads.setdefault(unit, []).append(storage)
                running.change(storage, delta)
            ends = place == last_backward
            if again and unit and unit in gathered:
                for made in gathered.pop(unit):
                    requests.drop(made)
            reduced = ([unit] if backward and unit else []) + ([0] if ends else [])
            for done in reduced:
                members = [index for index in by_unit.get(done, []) if requests.params[index].trainable]
                if not members:
                    continue
                new = requests.make(width * sum(requests.sizes[index] for index in members))
                for storage in grads.pop(done, []):
                    running.let_go(storage)
                if reducing:
                    requests.drop(reducing)
                reducing = new
                shards_of_grads += [requests.make(FP32 * requests.shard(index), REDUCE) for index in members]
                if unit and not again and done in gathered:
                    for made in gathered.pop(done):
                        requests.drop(made)
        for leftover in [*(made for unit_made in gathered.values() for made in unit_made), flat, reducing]:
            if leftover:
                requests.drop(leftover)
        running.end()
        if plan.offload == "none":
            if step == 0:
                for _ in range(plan.optimizer.states):
                    for size in trained:
                        requests.make(FP32 * size)
            _optimizer_temporaries(requests, trained)
        for made in shards_of_grads:
            requests.drop(made)


# DeepSpeed


def _deepspeed(requests: _Rank) -> None:
    plan, width, knobs = requests.plan, requests.width, requests.knobs
    numel = sum(requests.sizes[index] for index in requests.held)
    trained = sum(requests.sizes[index] for index in requests.trained)
    stage = plan.zero_stage
    part = -(-trained // requests.degree) if stage else trained
    groups = _groups(part, knobs.sub_group_size) if stage == 3 else [part]
    if stage == 3:
        if loads_into_cache(plan):
            requests.passing([width * requests.sizes[index] for index in requests.held])
        if plan.offload != "param":
            requests.make(width * -(-numel // requests.degree))
        requests.make(width * knobs.reduce_bucket_size)
        requests.make(width * part)
    elif stage:
        requests.make(width * numel)
    else:
        for index in requests.held:
            requests.make(width * requests.sizes[index])
    if plan.offload == "none":
        for size in groups:
            for _ in range(plan.optimizer.states + (1 if width < FP32 or stage else 0)):
                requests.make(FP32 * size)
    keeps = stage == 0 or (stage == 1 and not knobs.overlap_comm)
    segments = requests.segments()
    coordinator = _Coordinator(requests, segments) if stage == 3 and requests.degree > 1 else None
    for _ in range(STEPS):
        running = _Running(requests)
        bucket: list[tuple[int, int]] = []
        owned: tuple[int, int] | None = None
        if coordinator:
            coordinator.begin()
        for _, backward, events in segments:
            for storage, delta, label, module in events:
                if coordinator:
                    coordinator.enter(module)
                if label >= 0:
                    if backward and delta > 0 and not bucket and 0 < stage < 3 and knobs.contiguous_gradients:
                        count = 2 if knobs.overlap_comm else 1
                        bucket = [requests.make(width * knobs.reduce_bucket_size) for _ in range(count)]
                    if delta > 0:
                        running.change(storage, delta)
                    elif not keeps:  # whole, or dropped: copied into the bucket by then
                        running.let_go(storage)
                    continue
                running.change(storage, delta)
            if backward and not keeps and stage:
                requests.passing([width * min(knobs.reduce_bucket_size, trained)], REDUCE)
                if stage < 3 and owned is None and plan.offload == "none":
                    owned = requests.make(width * part)
        if coordinator:
            coordinator.end()
        if stage == 0 and requests.degree > 1:
            requests.passing([width * min(trained, 500_000_000)])
        for made in bucket:
            requests.drop(made)
        if plan.offload == "none":
            for size in groups:
                copy = requests.make(FP32 * size)
                if owned:
                    requests.drop(owned)
                    owned = None
                _optimizer_temporaries(requests, [size])
                requests.drop(copy)
        if owned:
            requests.drop(owned)
        running.end()


def _groups(numel: int, largest: int) -> list[int]:
    whole, rest = divmod(numel, max(1, largest))
    return [largest] * whole + ([rest] if rest else [])


class _Coordinator:
    """Stage 3's fetching: what a module needs, and ahead of it a prefetch bucket at each module, while live ones allow.

    Source: deepspeed/runtime/zero/partitioned_param_coordinator.py, fetch_sub_module and release_sub_module;
    partition_parameters.py, AllGatherCoalescedHandle.wait (each parameter is copied out of the flat buffer).
    """

    def __init__(self, requests: _Rank, segments: Sequence[tuple[int, bool, list[_Event]]]):
        self.requests, self.knobs = requests, requests.knobs
        names = requests.trace.events.modules
        places = {name: place for place, name in enumerate(names)}
        self.of_module: dict[int, list[int]] = {}
        for index in requests.held:
            owner = _owner(requests.params[index], places)
            self.of_module.setdefault(places.get(owner, 0), []).append(index)
        self.runs: list[int] = []
        for _, _, events in segments:
            for _, _, _, module in events:
                if module in self.of_module and (not self.runs or self.runs[-1] != module):
                    self.runs.append(module)
        self.numel = {module: sum(requests.sizes[index] for index in held) for module, held in self.of_module.items()}
        self.live_numel = 0
        self.live: dict[int, tuple[int, int]] = {}
        self.flat: dict[int, tuple[list[int], tuple[int, int]]] = {}
        self.persistent: set[int] = set()
        self.begin()

    def begin(self) -> None:
        self.place, self.fetched, self.module = -1, 0, -1

    def enter(self, module: int) -> None:
        """A module's first operation. Nothing happens while the same one goes on, or one without parameters runs."""
        if module == self.module or module not in self.of_module:
            return
        if self.module >= 0:
            self._release(self.module)
        self.module = module
        self.place += 1
        needed = self.of_module[module]
        self._gather([index for index in needed if index not in self.live and index not in self.flat])
        self.fetched = max(self.fetched, self.place + 1)
        ahead: list[int] = []
        room = min(self.knobs.max_live_parameters - self.live_numel, self.knobs.prefetch_bucket_size)
        while self.fetched < len(self.runs) and room > 0:
            for index in self.of_module[self.runs[self.fetched]]:
                if index not in self.live and index not in self.flat and index not in ahead:
                    ahead.append(index)
                    room -= self.requests.sizes[index]
            self.fetched += 1
        self._gather(ahead)
        for index in needed:
            self._wait(index)

    def end(self) -> None:
        for index in list(self.flat):
            self._wait(index)
        for index in [index for index in self.live if index not in self.persistent]:
            self._let_go(index)

    def _gather(self, wanted: list[int]) -> None:
        if not wanted:
            return
        sizes, width = self.requests.sizes, self.requests.width
        self.live_numel += sum(sizes[index] for index in wanted)
        if len(wanted) == 1:  # gathered into the parameter's own storage
            self._hold(wanted[0], self.requests.make(width * sizes[wanted[0]], GATHER))
            return
        buffer = self.requests.make(width * sum(sizes[index] for index in wanted), GATHER)
        group = (list(wanted), buffer)
        for index in wanted:
            self.flat[index] = group

    def _wait(self, index: int) -> None:
        if index not in self.flat:
            return
        group, buffer = self.flat[index]
        for member in group:
            self._hold(member, self.requests.make(self.requests.width * self.requests.sizes[member], GATHER))
            del self.flat[member]
        self.requests.drop(buffer)

    def _hold(self, index: int, made: tuple[int, int]) -> None:
        self.live[index] = made
        if self.requests.sizes[index] <= self.knobs.param_persistence_threshold:
            self.persistent.add(index)
            self.live_numel -= self.requests.sizes[index]

    def _let_go(self, index: int) -> None:
        self.requests.drop(self.live.pop(index))
        self.live_numel -= self.requests.sizes[index]

    def _release(self, module: int) -> None:
        """Let go unless it is used again within max_reuse_distance."""
        soon: set[int] = set()
        travelled = 0
        for place in range(self.place + 1, len(self.runs)):
            if travelled >= self.knobs.max_reuse_distance or self.runs[place] == module:
                soon.update(self.of_module[module] if self.runs[place] == module else ())
                break
            travelled += self.numel[self.runs[place]]
        for index in self.of_module[module]:
            if index in self.live and index not in soon and index not in self.persistent:
                self._let_go(index)


def _owner(param: Param, places: dict[str, int]) -> str:
    """The innermost module of those named that holds the parameter."""
    name = param.name
    while "." in name:
        name = name.rpartition(".")[0]
        if name in places:
            return name
    return ""
