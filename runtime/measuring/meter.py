"""The meter: fills a ledger from a real run, and leaves it for the launcher."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from dsplan.runtime.measuring.observing import Observer
from dsplan.runtime.measuring.watching import StepWatch
from dsplan.schemas.ledger import Ledger, Phase

if TYPE_CHECKING:
    from dsplan.runtime.engine import Engine

STEPS_WATCHED = 2
"""Optimizer steps that were carried out. The second has its states from the start, and so is the one to report."""
STEPS_TRIED = 8
"""With skipped ones among them."""


class Meter(Observer):
    """Observer of an engine. Watches some steps, and of the others only looks at the clock.

    steps: which, 1 the first; None for the first two that are carried out. told: what is done with each ledger.
    """

    def __init__(
        self, engine: Engine, steps: Sequence[int] | None = None, told: Callable[[Ledger], None] = lambda _: None
    ):
        self._engine = engine
        self._steps = steps
        self._told = told
        self.ledger: Ledger | None = None
        """Of the last step that was watched."""
        self._watch: StepWatch | None = None
        self._watched = self._tried = 0
        self._skipped_before = 0
        self._allocated: dict[Phase, int] = {}
        self._phase: Phase | None = None
        self._reserved_bytes: int | None = None
        self._step_seconds: list[float] = []
        self._last_end: float | None = None
        self.watched_step: int | None = None
        """The last that was watched, and so took longer; 1 the first."""

    def forward_begins(self, inputs: list[torch.Tensor]) -> None:
        if self._watch is None and self._wanted():
            self._skipped_before = self._engine.skipped_steps
            self._watch = StepWatch(self._engine)
            self._watch.start()
        if self._watch is not None:
            self._count_allocator("forward")
            self._watch.forward_begins(inputs)

    def backward_begins(self) -> None:
        if self._watch is not None:
            self._count_allocator("backward")
            self._watch.backward_begins()

    def step_begins(self) -> None:
        if self._watch is not None:
            self._count_allocator("step")
            self._watch.step_begins()

    def step_ends(self) -> None:
        if self._watch is not None:
            self._count_allocator(None)
            self._watch.stop()
            self.ledger = self._watch.ledger("measurement", self._allocated)
            self._allocated = {}
            self._watch = None
            self.watched_step = self._engine.global_steps
            self._tried += 1
            if self._engine.skipped_steps == self._skipped_before:
                self._watched += 1
            self._last_end = None
            self._told(self.ledger)
            return
        now = time.perf_counter()
        if self._last_end is not None:
            self._step_seconds.append(now - self._last_end)
        self._last_end = now

    def write(self, folder: Path) -> None:
        """This rank's record: its ledger, and how long a step took (the median; None for less than two steps unwatched)."""
        record = {
            "device": torch.cuda.get_device_name() if self._engine.device.type == "cuda" else self._engine.device.type,
            "ledger": self.ledger.to_json() if self.ledger else None,
            "reserved_bytes": self._reserved_bytes,
            "steps": self._engine.global_steps,
            "skipped_steps": self._engine.skipped_steps,
            "step_seconds": statistics.median(self._step_seconds) if self._step_seconds else None,
        }
        (folder / f"record_{self._engine.global_rank}.json").write_text(json.dumps(record), "utf-8")

    def _wanted(self) -> bool:
        if self._steps is not None:
            return self._engine.global_steps + 1 in self._steps
        return self._watched < STEPS_WATCHED and self._tried < STEPS_TRIED

    def _count_allocator(self, phase: Phase | None) -> None:
        """On a GPU: note the allocator's peak of the phase that ends, and start afresh for the one that begins."""
        if self._engine.device.type != "cuda":
            return
        if self._phase is not None:
            peak = torch.cuda.max_memory_allocated()
            self._allocated[self._phase] = max(self._allocated.get(self._phase, 0), peak)
            self._reserved_bytes = max(self._reserved_bytes or 0, torch.cuda.max_memory_reserved())
        torch.cuda.reset_peak_memory_stats()
        self._phase = phase
