"""steps_per_print: a line of progress every so many steps."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from dsplan.reports.step_text import progress_text
from dsplan.runtime.groups import note
from dsplan.runtime.measuring.observing import Observer
from dsplan.runtime.measuring.step_loss import StepLoss

if TYPE_CHECKING:
    from dsplan.runtime.engine import Engine


class ProgressLine(Observer):
    """Collective at the steps that it tells of: the loss is the mean over micro-batches and ranks."""

    def __init__(self, engine: Engine, steps_per_print: int):
        self._engine = engine
        self._every = steps_per_print
        self._loss = StepLoss(engine.device)
        self._told: tuple[float, int] | None = None

    def forward_begins(self, inputs: list[torch.Tensor]) -> None:
        if self._told is None:  # after a checkpoint was loaded, if one was
            self._told = (time.perf_counter(), self._engine.global_samples)

    def backward_ends(self, loss: torch.Tensor) -> None:
        if (self._engine.global_steps + 1) % self._every == 0:
            self._loss.add(loss)

    def step_ends(self) -> None:
        engine = self._engine
        if engine.global_steps % self._every:
            return
        loss, now = self._loss.take(), time.perf_counter()
        assert self._told is not None
        (since, samples), self._told = self._told, (now, engine.global_samples)
        note(
            progress_text(
                step=engine.global_steps,
                skipped=engine.skipped_steps,
                lr=engine.get_lr(),
                mom=engine.get_mom(),
                loss=loss,
                grad_norm=engine.get_global_grad_norm(),
                samples_per_second=(engine.global_samples - samples) / (now - since),
            )
        )
