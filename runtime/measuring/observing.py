"""Observer: who is told what the engine does next. The meter, the rehearsal, monitors and reports are observers."""

from __future__ import annotations

import torch


class Observer:
    """Does nothing. One optimizer step is forward_begins ... step_ends, with as many passes as there are micro-batches.

    engine.observers holds them in the order in which they are told.
    """

    def forward_begins(self, inputs: list[torch.Tensor]) -> None:
        """A forward in training, with the tensors that the model is given."""

    def forward_ends(self) -> None:
        """The model has given its output; the script's loss is still to come."""

    def backward_begins(self) -> None:
        """The script has a loss."""

    def backward_ends(self, loss: torch.Tensor) -> None:
        """loss: one number, detached, as the script gave it."""

    def step_begins(self) -> None:
        """At the accumulation boundary, before gradients are looked at."""

    def step_ends(self) -> None:
        """The optimizer has stepped, or the step was skipped; counters and schedule are those after it."""
