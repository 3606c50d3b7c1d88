"""The loader of training_data: whose turn it is, and where a resumed run goes on."""

import itertools

import pytest
from dsplan.runtime.data import Loader, Share
from torch.utils.data import Dataset, DistributedSampler, IterableDataset


class Numbers(Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return index


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(12))


def loader(size, rank=0, world_size=1, *, micro_batch=2, drop_last=False, workers=0):
    share = Share(size, rank, world_size, drop_last=drop_last)
    return Loader(
        Numbers(size),
        micro_batch,
        drop_last=drop_last,
        collate_fn=list,
        num_workers=workers,
        sampler=share,
        pin_memory=False,
        rank=rank,
        world_size=world_size,
    )


@pytest.mark.parametrize(
    ("size", "world_size", "drop_last"), [(10, 2, False), (11, 4, False), (11, 4, True), (3, 8, False)]
)
def test_epochs_are_in_the_order_of_torchs_distributed_sampler(size, world_size, drop_last):
    for rank, epoch in itertools.product(range(world_size), range(3)):
        theirs = DistributedSampler(Numbers(size), world_size, rank, drop_last=drop_last)
        theirs.set_epoch(epoch)
        ours = Share(size, rank, world_size, drop_last=drop_last)
        ours.epoch = epoch
        assert list(ours) == list(theirs)
        assert len(ours) == len(theirs)


@pytest.mark.parametrize(("taken", "workers"), [(0, 0), (1, 0), (3, 0), (5, 0), (7, 0), (3, 2)])
def test_a_resumed_loader_gives_the_batches_that_were_not_given_yet(taken, workers):
    whole = loader(9, workers=workers)  # 5 batches an epoch
    endless = itertools.chain.from_iterable(whole for _ in range(3))
    for _ in range(taken):
        next(endless)
    position = whole.position(unused=0)
    rest = list(itertools.islice(endless, 8))
    again = loader(9, workers=workers)
    again.resume(position)
    assert list(itertools.islice(itertools.chain.from_iterable(again for _ in range(3)), 8)) == rest


def test_batches_of_an_unfinished_step_are_given_again():
    whole = loader(8)
    batches = iter(whole)
    seen = [next(batches) for _ in range(3)]
    again = loader(8)
    again.resume(whole.position(unused=1))
    assert next(iter(again)) == seen[2]


def test_on_another_number_of_ranks_the_same_samples_come_next():
    """4 ranks took 1 batch of 2 each: 8 samples. The next 8 are the same for 2 ranks of 2 batches and for 1 rank of 4."""
    position = None
    nexts = {}
    for world_size in (4, 2, 1):
        batches = 4 // world_size
        ranks = [loader(32, rank, world_size) for rank in range(world_size)]
        if world_size == 4:
            iterators = [iter(each) for each in ranks]
            first = [next(iterator) for iterator in iterators]
            assert len({sample for batch in first for sample in batch}) == 8
            position = ranks[0].position(unused=0)
            assert position == {"epoch": 0, "samples": 8}
        else:
            for each in ranks:
                each.resume(position)
            iterators = [iter(each) for each in ranks]
        nexts[world_size] = sorted(x for iterator in iterators for _ in range(batches) for x in next(iterator))
    assert nexts[4] == nexts[2] == nexts[1]


def test_a_loop_that_is_left_ends_its_epoch():
    whole = loader(8)
    for _ in whole:
        break
    assert whole.position(unused=0) == {"epoch": 1, "samples": 0}
    assert len(list(whole)) == 4
    assert whole.position(unused=0) == {"epoch": 2, "samples": 0}


def test_a_stream_is_read_up_to_where_it_was():
    def stream():
        return Loader(
            Stream(),
            2,
            drop_last=False,
            collate_fn=list,
            num_workers=0,
            sampler=None,
            pin_memory=False,
            rank=0,
            world_size=1,
        )

    whole = stream()
    batches = iter(whole)
    next(batches), next(batches)
    again = stream()
    again.resume(whole.position(unused=0))
    assert next(iter(again)) == [4, 5] == next(batches)
    assert next(stream()) == [0, 1]  # a loader is its own iterator too


def test_nothing_is_drawn_from_the_scripts_own_generator():
    import torch

    before = torch.get_rng_state()
    list(loader(8, workers=1))
    assert torch.equal(torch.get_rng_state(), before)
