"""The trace cut where DeepSpeed acts: at each whole gradient, and where a module begins or ends."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from dsplan.planner.memory.replay import block_cut, stages_of
from dsplan.planner.memory.shards import local_numel, outside_blocks, part_of
from dsplan.schemas.trace import ACTIVATION, SPLIT_ACTIVATION, Param, Trace
from numpy.typing import NDArray

Bytes = NDArray[np.int64]
GRAD, ENTER, LEAVE, END = range(4)
"""Kinds of marks: (GRAD, place of the parameter), (ENTER or LEAVE, module), (END, 0): forward or backward is over."""
Mark = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Beats:
    """Stretches of one pipeline stage's forward and backward, each closed by a mark.

    Arrays by beat. full_*: at the fullest moment of the beat; mark_*: when the mark comes. Gradients are those not whole
    yet, or not handed over: from its mark on a gradient is the engine's affair. Everything is of one tp rank.
    """

    params: tuple[Param, ...]
    """Of this stage, in the model's order."""
    numels: tuple[int, ...]
    """Of `params`, on one tp rank."""
    marks: tuple[Mark, ...]
    module_params: tuple[tuple[int, ...], ...]
    """By module: places in `params` of what its own forward uses, in their order."""
    names: tuple[str, ...]
    """By beat: the module that runs."""
    backward: NDArray[np.bool_]
    full_activation: Bytes
    full_grad: Bytes
    mark_activation: Bytes
    mark_grad: Bytes
    saved_activation: int
    """What one more micro-batch in flight keeps."""
    grad_order: tuple[int, ...]
    """Places of the parameters in the order of their GRAD marks."""
    is_grad: NDArray[np.bool_]
    """By beat: whether its mark is a GRAD."""

    def by_gradient(self) -> Beats:
        """The same with the marks of gradients and ends alone, each beat being the fullest of those that it joins."""
        kept = [index for index, (kind, _) in enumerate(self.marks) if kind in (GRAD, END)]
        total = self.full_activation + self.full_grad
        fullest = [
            begin + int(np.argmax(total[begin : end + 1]))
            for begin, end in zip([0, *(k + 1 for k in kept)], kept, strict=False)
        ]
        return replace(
            self,
            marks=tuple(self.marks[index] for index in kept),
            names=tuple(self.names[index] for index in fullest),
            backward=self.backward[kept],
            full_activation=self.full_activation[fullest],
            full_grad=self.full_grad[fullest],
            mark_activation=self.mark_activation[kept],
            mark_grad=self.mark_grad[kept],
            is_grad=self.is_grad[kept],
        )

    def weights_first(self) -> Beats:
        """The same where each linear layer's weight gradient is handed over before its bias'.

        Source: deepspeed/runtime/zero/linear.py, LinearFunctionForZeroStage3, which makes both at once; torch's own hands
        over the bias first.
        """
        marks, full, held = list(self.marks), self.full_grad.copy(), self.mark_grad.copy()
        for index, ((kind, bias), (following, weight)) in enumerate(itertools.pairwise(self.marks)):
            if kind == following == GRAD and self._linear(weight, bias):
                marks[index], marks[index + 1] = (GRAD, weight), (GRAD, bias)
                sooner = self._grad_bytes(weight) - self._grad_bytes(bias)
                held[index] -= sooner
                full[index + 1] -= sooner
        order = tuple(place for kind, place in marks if kind == GRAD)
        return replace(self, marks=tuple(marks), full_grad=full, mark_grad=held, grad_order=order)

    def _linear(self, weight: int, bias: int) -> bool:
        names = self.params[weight].name, self.params[bias].name
        whose = names[0].removesuffix(".weight")
        return names == (f"{whose}.weight", f"{whose}.bias") and len(self.params[weight].shape) == 2

    def _grad_bytes(self, place: int) -> int:
        return self.params[place].dtype_bytes * self.numels[place]


@dataclass(frozen=True, slots=True)
class Split:
    """What divides a pipeline stage's activations."""

    pp: int = 1
    tp: int = 1
    sequence_parallel: bool = False
    sp: int = 1


def beats_of(trace: Trace, split: Split, stage: int, *, modules: bool, weights_first: bool = False) -> Beats | None:
    """The beats of a pipeline stage, remembered per trace; modules: also where modules begin and end. None: not traced."""
    if not trace.segments:
        return None
    step = (id(trace.segments), id(trace.events))
    key = (step, split, stage, modules, weights_first)
    found = _remembered.get(key)
    if found is None or not _same_step(found[0], trace):
        if len(_remembered) > 1024:
            _remembered.clear()
        every = _beats(trace, split, stage)
        for with_modules, first, beats in (
            (True, False, every),
            (True, True, every.weights_first()),
            (False, False, every.by_gradient()),
        ):
            _remembered[step, split, stage, with_modules, first] = (trace, beats)
        found = _remembered[key]
    return found[1]


_remembered: dict[tuple[tuple[int, int], Split, int, bool, bool], tuple[Trace, Beats]] = {}


def _same_step(one: Trace, other: Trace) -> bool:
    """Whether they hold the very same step, as those of fp16 and bf16 may."""
    return one.segments is other.segments and one.units is other.units and one.events is other.events


def stage_params(trace: Trace, pp: int, stage: int) -> tuple[Param, ...]:
    """The parameters of one pipeline stage in the model's order: what precedes the blocks, the blocks, what follows.

    The trace lists those outside the blocks first. Which of them follow is told by their gradients, which come first.
    """
    outside = outside_blocks(trace, part_of(pp, stage)) if stage in (0, pp - 1) else ()
    after = after_blocks(trace)
    blocks = block_cut(len(trace.blocks), pp)[stage]
    inside = [param for unit in blocks for param in trace.units[unit].params]
    before = [param for param in outside if param.name not in after]
    return (*before, *inside, *(param for param in outside if param.name in after))


def after_blocks(trace: Trace) -> set[str]:
    """Names of the parameters outside the blocks whose gradients are whole before the backward of any block begins."""
    block = next((segment for segment in trace.segments if segment.phase == "backward" and segment.unit), None)
    if block is None:
        return set()
    if not len(trace.events):
        return {param.name for param in outside_blocks(trace, "last")}
    params, events = trace.all_params, trace.events
    labels = (events.label[events.storage[at]] for at in range(block.first_event) if not events.delta_bytes[at])
    return {params[label].name for label in labels if label >= 0}


def _beats(trace: Trace, split: Split, stage: int) -> Beats:
    pp = split.pp
    params = stage_params(trace, pp, stage)
    events = _stage_events(trace, pp, stage) if len(trace.events) else _stage_points(trace, pp, stage)
    modules = _Modules(trace, params)
    builder = _Builder(trace, split, params, modules)
    for phase, steps in itertools.groupby(events, key=lambda event: event[0]):
        builder.run(phase == "backward", steps)
    return builder.beats()


Event = tuple[str, int, int, str, int]
"""(phase, storage, bytes made or freed, module, label); storage -1: activations as they are now, without a storage."""


def _stage_events(trace: Trace, pp: int, stage: int) -> Iterator[Event]:
    """The events in which this stage runs. What earlier stages saved is theirs: a stage begins with its own input."""
    events, label = trace.events, trace.events.label
    stages = stages_of(trace, pp)
    firsts = [*(segment.first_event for segment in trace.segments), len(events)]
    plain, split = _levels(trace)
    begin = firsts[stages.index(stage)]
    below = above = 0
    if stage:
        block = next(segment for segment in trace.segments if segment.unit and segment.phase == "forward")
        below, above = plain[begin] - block.start.activation_bytes, split[begin]
        yield "forward", -1, plain[begin] - below, "", ACTIVATION
    else:
        for index in range(firsts[0]):
            storage = events.storage[index]
            yield "forward", storage, events.delta_bytes[index], "", label[storage]
    previous = stages.index(stage) - 1
    for index, segment in enumerate(trace.segments):
        if stages[index] != stage:
            continue
        if previous != index - 1:  # other stages ran in between
            yield segment.phase, -1, plain[firsts[index]] - below, "", ACTIVATION
            yield segment.phase, -1, split[firsts[index]] - above, "", SPLIT_ACTIVATION
        previous = index
        for at in range(firsts[index], firsts[index + 1]):
            storage = events.storage[at]
            yield segment.phase, storage, events.delta_bytes[at], events.modules[events.module[at]], label[storage]


def _levels(trace: Trace) -> tuple[list[int], list[int]]:
    """Activations before each event: those that tp leaves whole, and those that it divides."""
    events = trace.events
    storage, delta = np.asarray(events.storage, np.int64), np.asarray(events.delta_bytes, np.int64)
    label = np.asarray(events.label, np.int64)[storage]
    plain, split = (np.cumsum(np.where(label == kind, delta, 0)).tolist() for kind in (ACTIVATION, SPLIT_ACTIVATION))
    return [0, *plain], [0, *split]


def _stage_points(trace: Trace, pp: int, stage: int) -> Iterator[Event]:
    """A trace without events: its points, with all gradients of a unit at the end of its backward."""
    places = {param.name: index for index, param in enumerate(trace.all_params)}
    late = {param.name for param in outside_blocks(trace, "last")}
    storage, seen_opening = 0, False
    for segment, found in zip(trace.segments, stages_of(trace, pp), strict=True):
        if found != stage:
            continue
        unit = trace.units[segment.unit]
        for point in (segment.start, *segment.points, segment.end):
            yield segment.phase, -1, point.activation_bytes - point.split_bytes, unit.name, ACTIVATION
            yield segment.phase, -1, point.split_bytes, unit.name, SPLIT_ACTIVATION
        if segment.phase == "backward":
            opening = segment.unit == 0 and not seen_opening and len(trace.units) > 1
            seen_opening = True
            for param in unit.params:
                if param.trainable and (segment.unit or (param.name in late) == opening):
                    storage, place = storage + 1, places[param.name]
                    yield segment.phase, storage, param.numel * param.dtype_bytes, unit.name, place
                    yield segment.phase, storage, 0, unit.name, place


class _Modules:
    """Which module holds which parameters, and which modules are inside which, all told by names."""

    def __init__(self, trace: Trace, params: Sequence[Param]):
        self.seen = {*trace.events.modules, "", *(unit.name for unit in trace.units)}
        self.number: dict[str, int] = {}
        self.held: list[list[int]] = []
        self._chains: dict[str, tuple[int, ...]] = {}
        for place, param in enumerate(params):
            self.held[self.index(self._called(param.name.rpartition(".")[0]))].append(place)

    def _called(self, name: str) -> str:
        """The innermost module around that name that runs."""
        while name not in self.seen:
            name = name.rpartition(".")[0]
        return name

    def index(self, name: str) -> int:
        if name not in self.number:
            self.number[name] = len(self.number)
            self.held.append([])
        return self.number[name]

    def chain(self, name: str) -> tuple[int, ...]:
        """The modules around that name, from the outermost to itself."""
        found = self._chains.get(name)
        if found is None:
            parts = name.split(".") if name else []
            names = ["", *(".".join(parts[: end + 1]) for end in range(len(parts)))]
            found = self._chains[name] = tuple(self.index(each) for each in names if each in self.seen)
        return found

    def uses(self, name: str, place: int) -> None:
        """A module whose backward makes the gradient of a parameter uses it, whoever holds it."""
        held = self.held[self.index(name)]
        if name and place not in held:
            held.append(place)


class _Builder:
    def __init__(self, trace: Trace, divisors: Split, params: Sequence[Param], modules: _Modules):
        self.trace, self.divisors, self.params, self.modules = trace, divisors, params, modules
        place_of = {param.name: place for place, param in enumerate(params)}
        self.places = [place_of.get(param.name, -1) for param in trace.all_params]
        self.numels = [local_numel(param, divisors.tp) for param in params]
        self.marks: list[Mark] = []
        self.rows: list[tuple[str, bool, int, int, int, int]] = []
        self.whole = self.split = self.grad = 0
        self.best = (0, 0)
        self.running = ""
        self.open: tuple[int, ...] = ()
        self.pending: dict[int, int] = {}
        self.handed: set[int] = set()
        self.saved = 0

    @property
    def activation(self) -> int:
        """Of one rank. Source: as memory/native_passes.py, divided."""
        by = self.divisors
        rest = -(-self.whole // by.tp) if by.sequence_parallel else self.whole
        return -(-(rest - (-self.split // by.tp)) // by.sp)

    def run(self, backward: bool, events: Iterator[Event]) -> None:
        """All events of a phase."""
        self.backward, entered = backward, not backward or self.trace.loss_inside
        self.best = (self.activation, self.grad)
        if entered:
            self._move("")
        for _, storage, delta, module, label in events:
            if module and not entered:  # the loss is over: the model itself comes first
                entered = True
                self._move("")
            if entered and module != self.running:
                self._move(module)
            self._take(storage, delta, label, module)
        self._leave_all()
        self._close((END, 0))
        if not backward:
            self.saved = self.activation

    def _take(self, storage: int, delta: int, label: int, module: str) -> None:
        if label >= 0:
            place = self.places[label]
            if place < 0:
                return
            param = self.params[place]
            if delta == 0:
                self.grad -= self.pending.pop(storage, 0)
                self.handed.add(storage)
                self._close((GRAD, place))
                return
            if storage in self.handed or (delta < 0 and storage not in self.pending):
                return  # the engine's affair; or another pipeline stage's, as the other part of a tied weight's gradient
            if module and delta > 0:
                self.modules.uses(module, place)
            part = -(-delta * self.numels[place] // param.numel) if param.numel else 0
            self.pending[storage] = self.pending.get(storage, 0) + part
            self.grad += part
        elif storage < 0:
            if label == SPLIT_ACTIVATION:
                self.split = delta
            else:
                self.whole = delta
        elif label == SPLIT_ACTIVATION:
            self.split += delta
        else:
            self.whole += delta
        if delta > 0 and self.activation + self.grad > sum(self.best):
            self.best = (self.activation, self.grad)

    def _move(self, module: str) -> None:
        """Close the modules that end here, and open those that begin."""
        chain = self.modules.chain(module)
        common = 0
        while common < min(len(chain), len(self.open)) and chain[common] == self.open[common]:
            common += 1
        for left in reversed(self.open[common:]):
            self._close((LEAVE, left))
        for entered in chain[common:]:
            self._close((ENTER, entered))
        self.open, self.running = chain, module

    def _leave_all(self) -> None:
        for left in reversed(self.open):
            self._close((LEAVE, left))
        self.open, self.running = (), ""

    def _close(self, mark: Mark) -> None:
        now = (self.activation, self.grad)
        if sum(now) > sum(self.best):
            self.best = now
        self.marks.append(mark)
        self.rows.append((self.running, self.backward, *self.best, *now))
        self.best = now

    def beats(self) -> Beats:
        columns = list(zip(*self.rows, strict=True))
        arrays = [np.array(column, dtype=np.int64) for column in columns[2:]]
        held = tuple(tuple(sorted(places)) for places in self.modules.held)
        return Beats(
            params=tuple(self.params),
            numels=tuple(self.numels),
            marks=tuple(self.marks),
            module_params=held,
            names=tuple(columns[0]),
            backward=np.array(columns[1], dtype=bool),
            full_activation=arrays[0],
            full_grad=arrays[1],
            mark_activation=arrays[2],
            mark_grad=arrays[3],
            saved_activation=self.saved,
            grad_order=tuple(place for kind, place in self.marks if kind == GRAD),
            is_grad=np.array([kind == GRAD for kind, _ in self.marks]),
        )
