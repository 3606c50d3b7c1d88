"""PyTorch's CUDA caching allocator as arithmetic: what it reserves of the device for a sequence of requests.

Source: torch 2.13, c10/cuda/CUDACachingAllocator.cpp (malloc, get_free_block, alloc_block, try_allocate_expandable_block,
free_block, release_cached_blocks) and c10/core/CachingDeviceAllocator.h for the sizes. Each stream has blocks of its own. What several
streams use is free at once, though a GPU that lags behind would delay it. Without roundup_power2_divisions, max_split_size_mb
and garbage_collection_threshold, which are off by default.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

MIB = 1 << 20
MIN_BLOCK = 512
"""Every request is rounded up to a multiple of it (kMinBlockSize)."""
SMALL = MIB
"""The largest request of the small pool (kSmallSize)."""
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
"""Segment of the large pool for a request below LARGE_ALONE; a page of an expandable one (kSmallBuffer, kLargeBuffer)."""
LARGE_ALONE = 10 * MIB
"""From here on a request has a segment of its own, rounded up to ROUND_LARGE (kMinLargeAlloc, kRoundLarge)."""
ROUND_LARGE = 2 * MIB


@dataclass(frozen=True, slots=True)
class Reserved:
    """Peaks of a replay. out_of_memory: a request was refused with all cached blocks given back."""

    allocated_bytes: int
    reserved_bytes: int
    out_of_memory: bool = False


class _Pool:
    """Free blocks of one stream's small or large requests, as sorted (size, address, block). tail: the end of an expandable segment."""

    __slots__ = ("free", "segment", "small", "start", "tail")

    def __init__(self, small: bool, start: int):
        self.small, self.start = small, start
        self.segment = SMALL_SEGMENT if small else LARGE_SEGMENT
        self.free: list[tuple[int, int, _Block]] = []
        self.tail: _Block | None = None


class _Block:
    """A piece of a segment: between its neighbours in the address space, None at the segment's ends."""

    __slots__ = ("address", "allocated", "before", "behind", "pool", "size")

    def __init__(
        self, address: int, size: int, pool: _Pool, before: _Block | None = None, behind: _Block | None = None
    ):
        self.address, self.size, self.pool = address, size, pool
        self.before, self.behind = before, behind
        self.allocated = False


class CachingAllocator:
    """malloc and free of one device. expandable: expandable_segments:True. limit_bytes: of the device; None: without end."""

    def __init__(self, expandable: bool = False, limit_bytes: int | None = None):
        self.expandable, self.limit_bytes = expandable, limit_bytes
        self.allocated_bytes = self.reserved_bytes = self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._next_address = 0

    def malloc(self, request: int, stream: int = 0) -> _Block:
        """MemoryError where the limit does not allow it even after all cached segments were given back."""
        size = -(-request // MIN_BLOCK) * MIN_BLOCK or MIN_BLOCK
        small = size <= SMALL
        pool = self._pools.get((stream, small)) or self._pool(stream, small)
        # best fit: the smallest free block that is large enough, the lowest address among equals
        free = pool.free
        place = bisect_left(free, (size,))
        if place == len(free):
            block = self._grown(size, pool)
        else:
            if self.expandable and free[place][2] is pool.tail and place + 1 < len(free):
                place += 1  # the block that can still grow counts as the largest
            block = free.pop(place)[2]
        remaining = block.size - size
        if remaining >= MIN_BLOCK if small or self.expandable else remaining > SMALL:
            behind = block.behind
            rest = _Block(block.address + size, remaining, pool, block, behind)
            if behind is not None:
                behind.before = rest
            block.behind, block.size = rest, size
            if pool.tail is block:
                pool.tail = rest
            insort(free, (remaining, rest.address, rest))
        block.allocated = True
        self.allocated_bytes += block.size
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return block

    def free(self, block: _Block) -> None:
        """Back into its pool, merged with free neighbours."""
        assert block.allocated
        block.allocated = False
        self.allocated_bytes -= block.size
        free = block.pool.free
        before, behind = block.before, block.behind
        if before is not None and not before.allocated:
            del free[bisect_left(free, (before.size, before.address))]
            _absorb(before, block)
            block = before
        if behind is not None and not behind.allocated:
            del free[bisect_left(free, (behind.size, behind.address))]
            _absorb(block, behind)
        insort(free, (block.size, block.address, block))

    def empty_cache(self) -> None:
        """Gives back segments of which nothing is in use; of expandable ones every whole page that is free."""
        for pool in self._pools.values():
            for _, _, block in list(pool.free):
                if self.expandable:
                    self._unmap(block)
                elif block.before is None and block.behind is None:
                    _take(block)
                    self.reserved_bytes -= block.size

    def _pool(self, stream: int, small: bool) -> _Pool:
        """A new one, whose addresses start far from those of all others."""
        made = self._pools[stream, small] = _Pool(small, (2 * stream + small) << 60)
        return made

    def _grown(self, size: int, pool: _Pool) -> _Block:
        if self.expandable:
            return self._mapped(size, pool)
        segment = pool.segment
        if size >= LARGE_ALONE:
            segment = -(-size // ROUND_LARGE) * ROUND_LARGE
        self._reserve(segment)
        block = _Block(self._next_address, segment, pool)
        self._next_address += segment
        return block

    def _mapped(self, size: int, pool: _Pool) -> _Block:
        """Pages mapped at the end of the one growing segment of the pool, with what is free before them."""
        page, tail = pool.segment, pool.tail
        free = tail.size if tail is not None and not tail.allocated else 0
        more = -(-(size - free) // page) * page
        self._reserve(more)
        tail = pool.tail  # giving back pages may have cut it
        if tail is not None and not tail.allocated:
            _take(tail)
            tail.size += more
            return tail
        block = _Block(pool.start if tail is None else tail.address + tail.size, more, pool, tail)
        if tail is not None:
            tail.behind = block
        pool.tail = block
        return block

    def _reserve(self, size: int) -> None:
        if self.limit_bytes is not None and self.reserved_bytes + size > self.limit_bytes:
            self.empty_cache()
            if self.reserved_bytes + size > self.limit_bytes:
                raise MemoryError(size)
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _unmap(self, block: _Block) -> None:
        """Whole pages of a free block. Only at the end: pages unmapped in the middle can be mapped again, as new ones."""
        pool = block.pool
        whole = block.size // pool.segment * pool.segment
        if pool.tail is not block or not whole:
            return
        _take(block)
        self.reserved_bytes -= whole
        block.size -= whole
        if block.size:
            insort(pool.free, (block.size, block.address, block))
            return
        pool.tail = block.before
        if block.before is not None:
            block.before.behind = None


def _take(block: _Block) -> None:
    """Out of the free blocks."""
    free = block.pool.free
    del free[bisect_left(free, (block.size, block.address))]


def _absorb(block: _Block, following: _Block) -> None:
    block.size += following.size
    block.behind = following.behind
    if following.behind is not None:
        following.behind.before = block
    if block.pool.tail is following:
        block.pool.tail = block


def replay(
    events: Iterable[tuple[int, int]],
    *,
    streams: Mapping[int, int] | None = None,
    expandable: bool = False,
    limit_bytes: int | None = None,
) -> Reserved:
    """Peaks of time-ordered (storage, bytes): made or grown (+), freed or shrunk (-). A storage that changes its size moves.

    streams: those of storages that are not made on the first one.
    """
    allocator = CachingAllocator(expandable, limit_bytes)
    malloc, free = allocator.malloc, allocator.free
    held: dict[int, tuple[_Block, int]] = {}
    take, stream_of = held.pop, (streams or {}).get
    refused = False
    try:
        for storage, delta in events:
            if not delta:
                continue
            old = take(storage, None)
            if old is None:
                if delta > 0:
                    held[storage] = malloc(delta, stream_of(storage, 0)), delta
                continue
            size = delta + old[1]
            if size > 0:
                held[storage] = malloc(size, stream_of(storage, 0)), size
            free(old[0])
    except MemoryError:
        refused = True
    return Reserved(allocator.peak_allocated_bytes, allocator.peak_reserved_bytes, refused)
