"""Live bytes over one step, for a drawing: activations event by event, and what the engine holds through the ledger's moments.

At the ledger's moments the curve has the ledger's bytes. Between them each category that an engine holds is on a straight
line, and the sum never above the fullest moment of its phase.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dsplan.planner.memory.kept_inputs import as_run
from dsplan.planner.memory.replay import stages_of
from dsplan.schemas.ledger import CATEGORIES, Category, Ledger, Moment
from dsplan.schemas.plan import Plan
from dsplan.schemas.trace import ACTIVATION, SPLIT_ACTIVATION, Trace

HELD: tuple[Category, ...] = tuple(category for category in CATEGORIES if category != "activations")
"""Categories that the engine decides."""


@dataclass(frozen=True, slots=True)
class Instant:
    """What is live at one moment, by category."""

    phase: str
    module: str
    bytes: dict[Category, int]


@dataclass(frozen=True, slots=True)
class _Event:
    """One event of the trace as this stage sees it. unit: the block that runs, or the parts outside them."""

    phase: str
    unit: str
    module: str
    activation: int


def instants(trace: Trace, plan: Plan, book: Ledger, pp_stage: int) -> list[Instant]:
    """The micro-batch in which the ledger's moments lie, then the optimizer step. book: of that pipeline stage."""
    events = list(_events(as_run(trace, plan), plan, pp_stage))
    step = next(moment for moment in book.moments if moment.phase == "step")
    found: list[Instant] = []
    resident = {category: step.category_bytes(category) for category in HELD} | {"temporary": 0, "grads": 0}
    anchors: list[tuple[int, dict[Category, int]]] = [(0, {category: resident[category] for category in HELD})]
    offsets: dict[str, int] = {}
    tops: dict[str, int] = {}
    for phase in ("forward", "backward"):
        moment = next((moment for moment in book.moments if moment.phase == phase), None)
        mine = [index for index, event in enumerate(events) if event.phase == phase]
        if moment is None or not mine:
            continue
        place = _place(moment, events, mine)
        offsets[phase] = moment.category_bytes("activations") - events[place].activation
        tops[phase] = moment.allocated_bytes
        anchors.append((place, {category: moment.category_bytes(category) for category in HELD}))
    anchors.append((len(events), {category: step.category_bytes(category) for category in HELD} | {"temporary": 0}))
    for index, event in enumerate(events):
        held = _between(anchors, index)
        activation = max(0, event.activation + offsets.get(event.phase, 0))
        top = tops.get(event.phase, activation + sum(held.values()))
        activation = min(activation, top)
        over = activation + sum(held.values()) - top
        if over > 0:  # the engine holds less there than on the line
            held = _lowered(held, over)
        found.append(Instant(event.phase, event.module, {**held, "activations": activation}))
    found.append(Instant("optimizer step", "", {category: step.category_bytes(category) for category in CATEGORIES}))
    return found


def _events(trace: Trace, plan: Plan, pp_stage: int) -> Iterator[_Event]:
    """The trace's events in which the stage runs."""
    stages = stages_of(trace, plan.layout.pp)
    firsts = [*(segment.first_event for segment in trace.segments), len(trace.events)]
    levels = {ACTIVATION: 0, SPLIT_ACTIVATION: 0}
    number = 0
    for index, segment in enumerate(trace.segments):
        unit = trace.units[segment.unit].name
        while number < firsts[index + 1]:
            label = trace.events.label[trace.events.storage[number]]
            if label in levels:
                levels[label] += trace.events.delta_bytes[number]
            if stages[index] == pp_stage:
                module = trace.events.modules[trace.events.module[number]]
                held = levels[ACTIVATION] + -(-levels[SPLIT_ACTIVATION] // plan.layout.tp)
                yield _Event(segment.phase, unit, module or unit, held)
            number += 1


def _place(moment: Moment, events: Sequence[_Event], mine: Sequence[int]) -> int:
    """The event at which a moment lies: by the unit or module that it names, there the fullest; before and after: the ends."""
    name = moment.where.partition(" of ")[2]
    name = "" if name.startswith("the parts") else name
    there = [index for index in mine if name in (events[index].unit, events[index].module)] or list(mine)
    if moment.where.startswith("before "):
        return there[0]
    if moment.where.startswith("after "):
        return there[-1]
    return max(there, key=lambda index: events[index].activation)


def _between(anchors: Sequence[tuple[int, dict[Category, int]]], index: int) -> dict[Category, int]:
    """Each category on the line between the anchors around that event."""
    after = next(number for number, (place, _) in enumerate(anchors) if place >= index and number > 0)
    (low, first), (high, second) = anchors[after - 1], anchors[after]
    share = (index - low) / (high - low) if high > low else 1.0
    return {category: round(first[category] + share * (second[category] - first[category])) for category in HELD}


def _lowered(held: dict[Category, int], over: int) -> dict[Category, int]:
    """Less of what comes and goes first, so that the sum is lower by `over`."""
    for category in ("temporary", "buckets", "gathered_params", "grads", "optimizer", "params"):
        less = min(over, held[category])
        held = {**held, category: held[category] - less}
        over -= less
    return held
