"""deepspeed.utils.logging."""

from __future__ import annotations

import logging

import torch.distributed as dist
from dsplan.runtime.groups import note

logger = logging.getLogger("DeepSpeed")


def log_dist(message: str, ranks: list[int] | None = None, level: int = logging.INFO) -> None:
    """One line from rank 0, where it is meant to speak."""
    if ranks is None or -1 in ranks or not dist.is_initialized() or dist.get_rank() in ranks:
        note(message)
