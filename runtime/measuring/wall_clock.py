"""How long the parts of each optimizer step take: wall_clock_breakdown."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from dsplan.reports.step_text import seconds_text
from dsplan.runtime.groups import note
from dsplan.runtime.measuring.observing import Observer

if TYPE_CHECKING:
    from dsplan.runtime.engine import Engine

PHASES = ("forward", "loss", "backward", "step")


class WallClock(Observer):
    """Sums up forward, loss, backward and step over a step's micro-batches. On a GPU each ends when the device is through,
    which costs the overlap of host and device, as it does in DeepSpeed."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self.phases: dict[str, float] = {}
        """Seconds of the last step that ended."""
        self.step_seconds: float | None = None
        """From the end of one step to that of the next; None for the first."""
        self._running = dict.fromkeys(PHASES, 0.0)
        self._since = 0.0
        self._last_end: float | None = None

    def forward_begins(self, inputs: list[torch.Tensor]) -> None:
        self._since = self._now()

    def forward_ends(self) -> None:
        self._count("forward")

    def backward_begins(self) -> None:
        self._count("loss")

    def backward_ends(self, loss: torch.Tensor) -> None:
        self._count("backward")

    def step_begins(self) -> None:
        self._since = self._now()

    def step_ends(self) -> None:
        self._count("step")
        self.phases, self._running = self._running, dict.fromkeys(PHASES, 0.0)
        end = self._since
        self.step_seconds = None if self._last_end is None else end - self._last_end
        self._last_end = end
        engine = self._engine
        text = seconds_text(self.phases, self.step_seconds, engine.train_batch_size())
        watched = engine.meter is not None and engine.meter.watched_step == engine.global_steps
        note(f"step {engine.global_steps}: {text}{' (slowed down by the meter)' if watched else ''}")

    def timers(self) -> dict[str, float]:
        """In milliseconds, under the names of DeepSpeed's timers. Source: deepspeed/utils/timer.py, *_GLOBAL_TIMER."""
        names = {"forward": "fwd", "backward": "bwd", "step": "step"}
        return {timer: self.phases[phase] * 1e3 for phase, timer in names.items() if phase in self.phases}

    def _count(self, phase: str) -> None:
        now = self._now()
        self._running[phase] += now - self._since
        self._since = now

    def _now(self) -> float:
        if self._engine.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()
