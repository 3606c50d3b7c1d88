"""training_data -> a loader that gives each rank its own share, one micro-batch at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset


def build_loader(
    dataset: Dataset[Any], micro_batch: int, *, drop_last: bool, collate_fn: Callable[[Any], Any] | None
) -> DataLoader[Any]:
    """Shuffled and split over the ranks, as deepspeed_io does; an iterable data set is read as it comes."""
    sampler: DistributedSampler[Any] | None = None
    if not isinstance(dataset, IterableDataset):
        sampler = DistributedSampler(dataset, dist.get_world_size(), dist.get_rank(), drop_last=drop_last)
    return DataLoader(dataset, micro_batch, sampler=sampler, drop_last=drop_last, collate_fn=collate_fn)
