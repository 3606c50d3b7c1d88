"""A recording of few repeated blocks -> that of all of them, written out event by event.

The peak of a step is a maximum over moments (the loss, the last backward, the step), so no scalar is extrapolated.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dsplan.planner.tracing.recording import Cut, Event, Recording
from dsplan.planner.tracing.repeating import KEPT, PATTERN, Run
from dsplan.schemas.trace import TracePhase

LAST = KEPT - 1


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Events and cuts of one phase in which a traced repeat runs; repeat None: what comes before the run."""

    phase: TracePhase
    repeat: int | None
    events: range
    cuts: range


def replicated(recording: Recording, runs: Sequence[Run], names: Sequence[str]) -> Recording | None:
    """The recording with the blocks that were left out of the runs; None where those that were traced differ.

    names: of all blocks. A repeat may use and free what it made, what its neighbours made and what comes from outside the
    run; outside, what the first two and the last two repeats made may be used and freed.
    """
    if any(_used_outside(recording, run) for run in runs):
        return None
    whole: Recording | None = recording
    for run in runs:
        whole = _with_all(whole, run, names) if whole is not None else None
    return whole


def _used_outside(recording: Recording, run: Run) -> bool:
    """Whether something outside the run, or its first or last repeat, uses what the middle one made.

    Then it is done once for each repeat, as where the outputs of all blocks are summed up or put side by side.
    """
    stretches = _stretches(recording, run) or []
    births = _births(recording, stretches)
    return any(
        (born := births.get(storage)) is not None and born[0] == PATTERN
        for stretch in stretches
        if stretch.repeat in (None, 0, LAST)
        for used in recording.uses[stretch.cuts.start : stretch.cuts.stop]
        for storage in used
    )


def _with_all(recording: Recording, run: Run, names: Sequence[str]) -> Recording | None:
    stretches = _stretches(recording, run)
    if stretches is None:
        return None
    writer = _Writer(recording, run, names, stretches)
    by_home = {(stretch.phase, stretch.repeat): stretch for stretch in stretches}
    likes: dict[TracePhase, int] = {"forward": PATTERN + 1, "backward": PATTERN - 1}
    for phase, like in likes.items():
        if (phase, like) in by_home and writer.told(by_home[phase, like]) != writer.told(by_home[phase, PATTERN]):
            return None
    try:
        for stretch in stretches:
            repeats = [run.true(LAST if stretch.repeat is None else stretch.repeat)]
            if stretch.repeat == PATTERN:
                repeats += range(PATTERN + 1, run.true(PATTERN + 1))
            for repeat in sorted(repeats, reverse=stretch.phase == "backward"):
                writer.write(stretch, repeat)
    except _FarApart:
        return None
    return writer.recording()


class _FarApart(Exception):
    """A repeat or what lies outside frees what repeats in the middle made: not known of those that were left out."""


def _stretches(recording: Recording, run: Run) -> list[_Stretch] | None:
    """The timeline by traced repeats; None where they do not follow each other, forth and back, each in one piece."""
    cuts = recording.cuts
    home = {1 + block: repeat for repeat in range(KEPT) for block in run.blocks_of(run.true(repeat))}
    begins: list[tuple[int, TracePhase, int | None]] = [(0, "forward", None)]
    for index, (_, unit, phase) in enumerate(cuts):
        if phase == "backward" and begins[-1][1] == "forward":
            begins.append((index, phase, None))
        if unit in home and home[unit] != begins[-1][2]:
            begins.append((index, phase, home[unit]))
    order = [(phase, repeat) for _, phase, repeat in begins if repeat is not None]
    forth = [("forward", repeat) for repeat in range(KEPT)]
    if order not in (forth, forth + [("backward", repeat) for repeat in reversed(range(KEPT))]):
        return None
    starts = [0, *(cuts[index][0] for index, _, _ in begins[1:]), len(recording.events)]
    ends = [*(index for index, _, _ in begins[1:]), len(cuts)]
    return [
        _Stretch(phase, repeat, range(first, last), range(begin, end))
        for (begin, phase, repeat), (first, last), end in zip(begins, itertools.pairwise(starts), ends, strict=True)
    ]


def _births(recording: Recording, stretches: Sequence[_Stretch]) -> dict[int, tuple[int, Any] | None]:
    """By storage: the repeat that made it, with phase and number; None where it was made outside the run."""
    births: dict[int, tuple[int, Any] | None] = {}
    for stretch in stretches:
        number = 0
        for storage, _, _ in recording.events[stretch.events.start : stretch.events.stop]:
            if storage not in births:
                births[storage] = None if stretch.repeat is None else (stretch.repeat, (stretch.phase, number))
                number += 1
    return births


class _Writer:
    """Tells and writes stretches of a recording, with storages, modules and parameters by the repeat they belong to."""

    def __init__(self, recording: Recording, run: Run, names: Sequence[str], stretches: Sequence[_Stretch]):
        self._run, self._names, self._read = run, names, recording
        traced = {block: repeat for repeat in range(KEPT) for block in run.blocks_of(run.true(repeat))}
        self._units = {1 + block: (repeat, (block - run.first) % run.period) for block, repeat in traced.items()}
        self._modules = [self._of_module(name, traced) for name in recording.modules]
        first_unit, later_unit = 1 + run.first, 1 + run.first + run.period
        self._first_param = sum(owner < first_unit for owner in recording.owners)
        self._num_params = sum(first_unit <= owner < later_unit for owner in recording.owners)
        self._storages = _births(recording, stretches)
        self._events: list[Event] = []
        self._labels: list[str | int] = []
        self._cuts: list[Cut] = []
        self._flops: list[tuple[int, int]] = []
        self._numbers: dict[Any, int] = {}
        self._module_numbers: dict[str, int] = {}

    def told(self, stretch: _Stretch) -> Any:
        """What happens in a stretch, told so that two repeats which do alike tell the same."""
        own = stretch.repeat or 0

        def seen(held: tuple[int, Any] | None, else_: Any) -> Any:
            return else_ if held is None else (held[0] - own, held[1])

        def label(value: str | int) -> Any:
            return value if isinstance(value, str) else seen(self._of_param(value), value)

        return (
            [
                (seen(self._storages[storage], storage), label(self._read.labels[storage]), delta, seen(self._modules[module], module))
                for storage, delta, module in self._events_of(stretch)
            ],
            [
                (first - stretch.events.start, seen(self._units.get(unit), unit))
                for first, unit, _ in self._read.cuts[stretch.cuts.start : stretch.cuts.stop]
            ],
        )  # fmt: skip

    def write(self, stretch: _Stretch, true: int) -> None:
        """Write the stretch as that of another repeat; of what lies outside the run, as it is."""
        own = LAST if stretch.repeat is None else stretch.repeat
        places = [_place(own, repeat, true, self._run) for repeat in range(KEPT)]

        def place(repeat: int) -> int:
            if places[repeat] is None:
                raise _FarApart
            return places[repeat]  # type: ignore[return-value]

        moved = len(self._events) - stretch.events.start
        for first, unit, phase in self._read.cuts[stretch.cuts.start : stretch.cuts.stop]:
            held = self._units.get(unit)
            if held is not None:
                unit = 1 + self._run.first + place(held[0]) * self._run.period + held[1]
            self._cuts.append((first + moved, unit, phase))
        self._flops += self._read.flops[stretch.cuts.start : stretch.cuts.stop]
        modules: dict[int, int] = {}
        for storage, delta, module in self._events_of(stretch):
            born = self._storages[storage]
            key = storage if born is None else (place(born[0]), born[1])
            number = self._numbers.get(key)
            if number is None:
                number = self._numbers[key] = len(self._labels)
                self._labels.append(self._label(self._read.labels[storage], place))
            if module not in modules:
                modules[module] = self._module_number(module, place)
            self._events.append((number, delta, modules[module]))

    def recording(self) -> Recording:
        return Recording(
            events=self._events,
            labels=self._labels,
            cuts=self._cuts,
            uses=(),
            flops=self._flops,
            modules=list(self._module_numbers),
            owners=self._read.owners,
        )

    def _events_of(self, stretch: _Stretch) -> Sequence[Event]:
        return self._read.events[stretch.events.start : stretch.events.stop]

    def _of_module(self, name: str, traced: dict[int, int]) -> tuple[int, Any] | None:
        for block, repeat in traced.items():
            prefix = self._names[block]
            if name == prefix or name.startswith(prefix + "."):
                return repeat, ((block - self._run.first) % self._run.period, name[len(prefix) :])
        return None

    def _of_param(self, ordinal: int) -> tuple[int, int] | None:
        held = self._units.get(self._read.owners[ordinal])
        return None if held is None else (held[0], (ordinal - self._first_param) % self._num_params)

    def _label(self, label: str | int, place: Any) -> str | int:
        held = None if isinstance(label, str) else self._of_param(label)
        return label if held is None else self._first_param + place(held[0]) * self._num_params + held[1]

    def _module_number(self, module: int, place: Any) -> int:
        held = self._modules[module]
        name = self._read.modules[module]
        if held is not None:
            block, rest = held[1]
            name = self._names[self._run.first + place(held[0]) * self._run.period + block] + rest
        return self._module_numbers.setdefault(name, len(self._module_numbers))


def _place(own: int, repeat: int, true: int, run: Run) -> int | None:
    """The number among all of a traced repeat, as seen from another that is written as number `true`."""
    if 0 < own < LAST or abs(repeat - own) <= 1:
        return true + repeat - own
    return run.true(repeat) if repeat != PATTERN else None
