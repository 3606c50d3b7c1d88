"""What a rehearsal tells: the ledger of rank 0 over one optimizer step, and every storage made and freed in it."""

from __future__ import annotations

from dataclasses import dataclass, field

from dsplan.schemas.ledger import Ledger

MICRO_BATCHES = 3
"""A first, a middle and a last micro-batch: bytes do not depend on how many there are in between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    ledger: Ledger
    events: tuple[tuple[int, int], ...] = field(repr=False, default=())
    """(storage, bytes made, or freed where negative) in time order. What is resident when the step begins comes first.

    A storage is a number, used again only after it was freed."""
    resident: int = 0
    """How many of the events are of what is resident when the step begins."""


class Recording:
    """Gathers a Rehearsal's events from a tracker's changes: (key, bytes), keys being addresses while a storage lives."""

    def __init__(self) -> None:
        self.events: list[tuple[int, int]] = []
        self.resident = 0
        self._numbers: dict[int, int] = {}

    def hold(self, key: int, num_bytes: int) -> None:
        """What is there when the step begins."""
        if num_bytes:
            self.change(key, num_bytes)
            self.resident = len(self.events)

    def change(self, key: int, delta: int) -> None:
        """A change that only renames the storage, all of it away and back, leaves no trace."""
        if not delta:
            return
        number = self._numbers.setdefault(key, len(self._numbers))
        if len(self.events) > self.resident and self.events[-1] == (number, -delta) and delta > 0:
            self.events.pop()
        else:
            self.events.append((number, delta))
