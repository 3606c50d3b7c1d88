"""The loss of one optimizer step: the mean over its micro-batches and over ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist


class StepLoss:
    """Summed on the device, without waiting for it, until it is asked for."""

    def __init__(self, device: torch.device):
        self._total = torch.zeros(2, device=device)

    def add(self, loss: torch.Tensor) -> None:
        self._total[0] += loss.reshape(())
        self._total[1] += 1

    def take(self) -> float:
        """Begins the next step. Collective; nan where there was no backward."""
        total = self._total.clone()
        self._total.zero_()
        dist.all_reduce(total)
        summed, number = total.tolist()
        return float(summed / number) if number else float("nan")
