"""What a timeline writes down of one forward and backward, and what becomes of it: segments and events."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from dsplan.schemas.trace import ACTIVATION, READ, SPLIT_ACTIVATION, Events, Point, Segment, TracePhase

STATE, OTHER, SPLIT, MARK = "state", "other", "split", "mark"
"""Categories of storages: what the model holds; all else; the part of it that tensor parallelism divides; no bytes, but when
a linear with a frozen weight would keep its input."""

_LABELS = {OTHER: ACTIVATION, SPLIT: SPLIT_ACTIVATION, MARK: READ}

Event = tuple[int, int, int]
"""(storage, bytes made or freed, module)."""
Cut = tuple[int, int, TracePhase]
"""(first event, unit, phase): from that event on the unit runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One forward and backward as it was seen. What comes before the first cut is what the model and the batch hold."""

    events: Sequence[Event]
    labels: Sequence[str | int]
    """By storage: its category, or the ordinal of the parameter whose gradient it is."""
    cuts: Sequence[Cut]
    """The last one closes the timeline; its unit is -1."""
    uses: Sequence[Set[int]]
    """By cut: storages that operations took in until the next one."""
    flops: Sequence[tuple[int, int]]
    """By cut: FLOPs until the next one, and of those what backward computes again. Empty: not known."""
    modules: Sequence[str]
    owners: Sequence[int]
    """The unit of each parameter, by ordinal."""

    def segments(self) -> tuple[Segment, ...]:
        """The timeline cut by units; segments in which nothing happened are left out."""
        live = {OTHER: 0, SPLIT: 0}
        for storage, delta, _ in self.events[: self.cuts[0][0]]:
            label = self.labels[storage]
            if label in live:
                live[label] += delta
        grads = [0] * (max(self.owners, default=0) + 1)
        grads += [0] * (max(unit for _, unit, _ in self.cuts) + 1 - len(grads))
        made: list[Segment] = []
        states = [self.labels[storage] == STATE for storage, _, _ in self.events]
        before = [0, *itertools.accumulate(not state for state in states)]
        for (begin, unit, phase), (end, _, _) in itertools.pairwise(self.cuts):
            points = [_point(live, grads[unit])]
            for storage, delta, _ in self.events[begin:end]:
                label = self.labels[storage]
                if isinstance(label, int):
                    grads[self.owners[label]] += delta
                elif label in live:
                    live[label] += delta
                if delta > 0 and label != STATE:
                    points.append(_point(live, grads[unit]))
            if end > begin:
                last = _point(live, grads[unit])
                made.append(
                    Segment(
                        unit=unit,
                        phase=phase,
                        start=points[0],
                        end=last,
                        points=undominated([*points, last]),
                        first_event=before[begin],
                    )
                )
        return tuple(made)

    def phase_flops(self) -> tuple[int, int, int] | None:
        """(forward, backward, computed again in backward); None where nothing was counted."""
        if not self.flops:
            return None
        sums = {"forward": 0, "backward": 0}
        again = 0
        for (_, _, phase), (made, repeated) in zip(self.cuts, self.flops, strict=True):
            sums[phase] += made
            again += repeated
        return sums["forward"], sums["backward"] - again, again

    def trace_events(self) -> Events:
        """All that was made and freed but for what the model holds; storages and modules are numbered as they come."""
        storages: dict[int, int] = {}
        modules: dict[str, int] = {"": 0}
        columns: tuple[list[int], list[int], list[int]] = ([], [], [])
        for storage, delta, module in self.events:
            if self.labels[storage] != STATE:
                columns[0].append(storages.setdefault(storage, len(storages)))
                columns[1].append(delta)
                columns[2].append(modules.setdefault(self.modules[module], len(modules)))
        told = [self.labels[storage] for storage in storages]
        labels = [label if isinstance(label, int) else _LABELS[label] for label in told]
        return Events.of(*columns, labels, tuple(modules))


def _point(live: Mapping[str, int], grad_bytes: int) -> Point:
    return Point(live[OTHER] + live[SPLIT], live[SPLIT], grad_bytes)


def undominated(points: Sequence[Point]) -> tuple[Point, ...]:
    """The points that no other exceeds in activation_bytes, in its part that tp leaves whole, and in grad_bytes.

    Under any tp the bytes are a mean of the first two, so no peak is lost.
    """

    def key(point: Point) -> tuple[int, int, int]:
        return (point.activation_bytes, point.activation_bytes - point.split_bytes, point.grad_bytes)

    kept: dict[tuple[int, int, int], Point] = {}
    for point in sorted(points, key=key, reverse=True):
        candidate = key(point)
        if not any(all(a >= b for a, b in zip(other, candidate, strict=True)) for other in kept):
            kept[candidate] = point
    return tuple(kept.values())
