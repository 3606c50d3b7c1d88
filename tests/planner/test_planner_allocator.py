"""The caching allocator against sequences worked out by hand from PyTorch's documented sizes."""

import pytest
from dsplan.planner.memory.allocator import MIB, CachingAllocator, replay
from hypothesis import given
from hypothesis import strategies as st


def states(allocator: CachingAllocator) -> tuple[float, float]:
    """MiB allocated and reserved."""
    return allocator.allocated_bytes / MIB, allocator.reserved_bytes / MIB


@pytest.mark.parametrize(
    ("request_bytes", "allocated_bytes", "reserved_mib"),
    [
        (1, 512, 2),  # rounded to 512 B, in a small segment of 2 MiB
        (513, 1024, 2),
        (MIB, MIB, 2),
        (MIB + 1, MIB + 512, 20),  # the large pool begins: a segment of 20 MiB
        (10 * MIB - 512, 10 * MIB - 512, 20),
        (10 * MIB, 10 * MIB, 10),  # a segment of its own, in steps of 2 MiB
        (25 * MIB, 26 * MIB, 26),  # the 1 MiB that is left is too small to be split off
        (24 * MIB + 512, 24 * MIB + 512, 26),  # more than 1 MiB is split off
    ],
)
def test_one_request(request_bytes, allocated_bytes, reserved_mib):
    allocator = CachingAllocator()
    allocator.malloc(request_bytes)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (allocated_bytes, reserved_mib * MIB)


def test_what_is_split_off_serves_the_next_request():
    allocator = CachingAllocator()
    allocator.malloc(9 * MIB)
    allocator.malloc(9 * MIB)
    assert states(allocator) == (18, 20)
    allocator.malloc(2 * MIB)
    assert states(allocator) == (20, 20)


def test_the_smallest_block_that_is_large_enough_is_taken():
    allocator = CachingAllocator()
    large, small = allocator.malloc(40 * MIB), allocator.malloc(14 * MIB)
    allocator.free(large)
    allocator.free(small)
    taken = allocator.malloc(14 * MIB)
    assert taken.address == small.address
    assert states(allocator) == (14, 54)


def test_free_neighbours_merge():
    allocator = CachingAllocator()
    whole = allocator.malloc(30 * MIB)
    allocator.free(whole)
    parts = [allocator.malloc(10 * MIB) for _ in range(3)]
    for part in (parts[0], parts[2], parts[1]):
        allocator.free(part)
    allocator.malloc(30 * MIB)
    assert states(allocator) == (30, 30)


def test_a_hole_that_is_too_small_stays_a_hole():
    allocator = CachingAllocator()
    whole = allocator.malloc(30 * MIB)
    allocator.free(whole)
    first, kept = allocator.malloc(14 * MIB), allocator.malloc(16 * MIB)
    allocator.free(first)
    allocator.malloc(16 * MIB)
    assert states(allocator) == (32, 46)
    assert kept.allocated


def test_cached_segments_are_given_back_before_a_request_is_refused():
    allocator = CachingAllocator(limit_bytes=40 * MIB)
    allocator.free(allocator.malloc(20 * MIB))
    allocator.malloc(30 * MIB)
    assert states(allocator) == (30, 30)
    assert allocator.peak_reserved_bytes == 30 * MIB
    with pytest.raises(MemoryError):
        allocator.malloc(12 * MIB)


def test_a_segment_of_which_a_part_is_in_use_is_not_given_back():
    allocator = CachingAllocator(limit_bytes=40 * MIB)
    whole = allocator.malloc(30 * MIB)
    allocator.free(whole)
    allocator.malloc(10 * MIB)
    with pytest.raises(MemoryError):
        allocator.malloc(22 * MIB)


def test_expandable_segments_grow_where_native_ones_are_replaced():
    native, expandable = CachingAllocator(), CachingAllocator(expandable=True)
    for allocator in (native, expandable):
        allocator.free(allocator.malloc(15 * MIB))
        allocator.malloc(30 * MIB)
    assert states(native) == (30, 16 + 30)
    assert states(expandable) == (30, 40)  # two pages of 20 MiB


def test_expandable_segments_give_back_whole_pages_at_their_end():
    allocator = CachingAllocator(expandable=True)
    kept, dropped = allocator.malloc(15 * MIB), allocator.malloc(45 * MIB)
    assert states(allocator) == (60, 60)
    allocator.free(dropped)
    allocator.empty_cache()
    assert states(allocator) == (15, 20)
    allocator.free(kept)
    allocator.empty_cache()
    assert states(allocator) == (0, 0)


def test_streams_share_nothing():
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(20 * MIB, stream=1))
    allocator.malloc(20 * MIB)
    assert states(allocator) == (20, 40)


def test_a_storage_that_changes_its_size_moves():
    found = replay([(1, 12 * MIB), (1, 12 * MIB), (1, -24 * MIB), (2, 12 * MIB)])
    assert found.allocated_bytes == 36 * MIB  # old and new side by side
    assert found.reserved_bytes == 36 * MIB  # the last one fits into what is cached
    assert not found.out_of_memory


def test_a_replay_ends_where_memory_does():
    assert replay([(1, 12 * MIB), (2, 12 * MIB)], limit_bytes=20 * MIB).out_of_memory


@given(st.lists(st.tuples(st.integers(1, 60 * MIB), st.integers(0, 2), st.booleans()), max_size=60), st.booleans())
def test_law_reserved_holds_what_is_allocated_and_freeing_all_leaves_nothing(steps, expandable):
    allocator = CachingAllocator(expandable)
    held = []
    for size, stream, frees in steps:
        if frees and held:
            allocator.free(held.pop(size % len(held)))
        else:
            held.append(allocator.malloc(size, stream))
        assert allocator.allocated_bytes == sum(block.size for block in held)
        assert allocator.reserved_bytes >= allocator.allocated_bytes
    for block in held:
        allocator.free(block)
    assert allocator.allocated_bytes == 0
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0
