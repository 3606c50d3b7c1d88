"""training_data -> a loader that gives each rank its own share, one micro-batch at a time, and knows how far it has come."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler


class Share(Sampler[int]):
    """A rank's share of each epoch's shuffled order: every world_size-th of it, from `start` on.

    Epoch 0 is in the order of torch's DistributedSampler, with whose seed 0 DeepSpeed shuffles; each epoch has an order of its
    own. The first n samples that all ranks take together are the first n of the order on any number of ranks.
    """

    def __init__(self, num_samples: int, rank: int, world_size: int, *, drop_last: bool):
        self.num_samples = num_samples
        self.rank = rank
        self.world_size = world_size
        self.drop_last = drop_last
        self.epoch = 0
        self.start = 0
        """Samples of this epoch that all ranks have taken together."""

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(self.num_samples, generator=generator).tolist()
        rest = order[self.start :]
        over = len(rest) % self.world_size
        if over and self.drop_last:
            rest = rest[:-over]
        elif over:  # the ranks come out even: some samples come twice, from the beginning of the order
            rest += list(itertools.islice(itertools.cycle(order), self.world_size - over))
        return iter(rest[self.rank :: self.world_size])

    def __len__(self) -> int:
        """Of a whole epoch."""
        whole, over = divmod(self.num_samples, self.world_size)
        return whole if self.drop_last else whole + (over > 0)


class Loader:
    """What initialize() gives for training_data. Each `for batch in loader` is one epoch, in an order of its own.

    Loaded from a checkpoint, it goes on with the batch after the last that it gave before the save, and the first loop over it
    is the rest of that epoch. The numbers that its workers begin with follow from the epoch; nothing is drawn from the
    script's own generators.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        micro_batch: int,
        *,
        drop_last: bool,
        collate_fn: Callable[[Any], Any] | None,
        num_workers: int,
        sampler: Any,
        pin_memory: bool,
        rank: int,
        world_size: int,
    ):
        self.dataset = dataset
        self.batch_size = micro_batch
        self.drop_last = drop_last
        self.sampler = sampler
        self._world_size, self._rank = world_size, rank
        self._generator = torch.Generator()
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            micro_batch,
            sampler=sampler,
            drop_last=drop_last,
            collate_fn=collate_fn,
            num_workers=num_workers,
            generator=self._generator,
            pin_memory=pin_memory,
        )
        self.epoch = 0
        self._taken = 0  # micro-batches of this epoch that this rank has given, beside those before `_start`
        self._start = 0  # samples of this epoch that were taken before the run was resumed, by all ranks together
        self._running: object = None
        self._iterator: Iterator[Any] | None = None

    def __len__(self) -> int:
        """Micro-batches of a whole epoch."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        if self._running is not None:  # the loop before was left; this one is a new epoch
            self._end_epoch()
        self._running = mine = object()
        return self._batches(mine)

    def __next__(self) -> Any:
        """DeepSpeed's loader is its own iterator."""
        if self._iterator is None:
            self._iterator = iter(self)
        return next(self._iterator)

    def _batches(self, mine: object) -> Iterator[Any]:
        self._generator.manual_seed(self.epoch * self._world_size + self._rank)
        if isinstance(self.sampler, Share):
            self.sampler.epoch, self.sampler.start = self.epoch, self._start
            source: Iterator[Any] = iter(self._loader)
        else:
            if hasattr(self.sampler, "set_epoch"):
                self.sampler.set_epoch(self.epoch)
            given = self._start // (self.batch_size * self._world_size)
            source = itertools.islice(iter(self._loader), given, None)  # read and thrown away: its order is not ours
        try:
            for batch in source:
                if self._running is not mine:
                    return
                self._taken += 1
                yield batch
        finally:  # also where the script breaks out of its loop
            if self._running is mine:
                self._end_epoch()

    def _end_epoch(self) -> None:
        self.epoch += 1
        self._taken = self._start = 0
        self._running = self._iterator = None

    def position(self, unused: int) -> dict[str, int]:
        """Where a resumed run goes on. unused: the last micro-batches given, which that run is to see again."""
        taken = max(self._taken - unused, 0) * self.batch_size * self._world_size
        return {"epoch": self.epoch, "samples": self._start + taken}

    def resume(self, position: dict[str, int]) -> None:
        self.epoch, self._start = position["epoch"], position["samples"]
        self._taken, self._running, self._iterator = 0, None, None


def build_loader(
    dataset: Dataset[Any],
    micro_batch: int,
    *,
    drop_last: bool,
    collate_fn: Callable[[Any], Any] | None,
    num_workers: int = 0,
    sampler: Any = None,
    pin_memory: bool = False,
) -> Loader:
    """Shuffled and split over the ranks; an iterable data set is read as it comes, by every rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if sampler is None and not isinstance(dataset, IterableDataset):
        size = len(dataset)  # type: ignore[arg-type]
        sampler = Share(size, rank, world_size, drop_last=drop_last)
    return Loader(
        dataset,
        micro_batch,
        drop_last=drop_last,
        collate_fn=collate_fn,
        num_workers=num_workers,
        sampler=sampler,
        pin_memory=pin_memory,
        rank=rank,
        world_size=world_size,
    )
