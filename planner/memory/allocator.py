"""PyTorch's CUDA caching allocator as arithmetic: what it reserves of the device for a sequence of requests.

Source: torch 2.13, c10/cuda/CUDACachingAllocator.cpp (malloc, get_free_block, alloc_block, try_allocate_expandable_block,
free_block, release_cached_blocks) and c10/core/CachingDeviceAllocator.h for the sizes. Each stream has blocks of its own. What several
streams use is free at once, though a GPU that lags behind would delay it. Without roundup_power2_divisions, max_split_size_mb
and garbage_collection_threshold, which are off by default.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
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


_Pool = tuple[int, bool]
"""(stream, whether it serves small requests)"""


class _Block:
    """A piece of a segment: between its neighbours in the address space, None at the segment's ends."""

    __slots__ = ("address", "allocated", "before", "behind", "pool", "size", "small")

    def __init__(self, address: int, size: int, pool: _Pool):
        self.address, self.size, self.pool, self.small = address, size, pool, pool[1]
        self.allocated = False
        self.before: _Block | None = None
        self.behind: _Block | None = None


class CachingAllocator:
    """malloc and free of one device. expandable: expandable_segments:True. limit_bytes: of the device; None: without end."""

    def __init__(self, expandable: bool = False, limit_bytes: int | None = None):
        self.expandable, self.limit_bytes = expandable, limit_bytes
        self.allocated_bytes = self.reserved_bytes = self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self._free: defaultdict[_Pool, list[tuple[int, int]]] = defaultdict(list)
        self._by_address: dict[int, _Block] = {}
        self._next_address = 0
        self._tails: dict[_Pool, _Block] = {}

    def malloc(self, request: int, stream: int = 0) -> _Block:
        """MemoryError where the limit does not allow it even after all cached segments were given back."""
        size = max(MIN_BLOCK, -(-request // MIN_BLOCK) * MIN_BLOCK)
        small = size <= SMALL
        pool = stream, small
        block = self._fitting(size, pool) or self._grown(size, pool)
        remaining = block.size - size
        if remaining >= MIN_BLOCK if small or self.expandable else remaining > SMALL:
            self._split(block, size)
        block.allocated = True
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: _Block) -> None:
        """Back into its pool, merged with free neighbours."""
        assert block.allocated
        block.allocated = False
        self.allocated_bytes -= block.size
        before, behind = block.before, block.behind
        if before is not None and not before.allocated:
            self._take(before)
            self._absorb(before, block)
            block = before
        if behind is not None and not behind.allocated:
            self._take(behind)
            self._absorb(block, behind)
        self._put(block)

    def empty_cache(self) -> None:
        """Gives back segments of which nothing is in use; of expandable ones every whole page that is free."""
        for free in list(self._free.values()):
            for _, address in list(free):
                block = self._by_address[address]
                if self.expandable:
                    self._unmap(block)
                elif block.before is None and block.behind is None:
                    self._take(block)
                    del self._by_address[address]
                    self.reserved_bytes -= block.size

    def _fitting(self, size: int, pool: _Pool) -> _Block | None:
        """Best fit: the smallest free block that is large enough, the lowest address among equals."""
        free = self._free[pool]
        place = bisect.bisect_left(free, (size, -1))
        if place == len(free):
            return None
        if self.expandable and self._by_address[free[place][1]] is self._tails[pool] and place + 1 < len(free):
            place += 1  # the block that can still grow counts as the largest
        return self._by_address[free.pop(place)[1]]

    def _grown(self, size: int, pool: _Pool) -> _Block:
        if self.expandable:
            return self._mapped(size, pool)
        segment = SMALL_SEGMENT if pool[1] else LARGE_SEGMENT
        if size >= LARGE_ALONE:
            segment = -(-size // ROUND_LARGE) * ROUND_LARGE
        self._reserve(segment)
        block = _Block(self._next_address, segment, pool)
        self._next_address += segment
        self._by_address[block.address] = block
        return block

    def _mapped(self, size: int, pool: _Pool) -> _Block:
        """Pages mapped at the end of the one growing segment of the pool, with what is free before them."""
        page = SMALL_SEGMENT if pool[1] else LARGE_SEGMENT
        tail = self._tails.get(pool)
        free = tail.size if tail is not None and not tail.allocated else 0
        more = -(-(size - free) // page) * page
        self._reserve(more)
        tail = self._tails.get(pool)  # giving back pages may have cut it
        if tail is not None and not tail.allocated:
            self._take(tail)
            tail.size += more
            return tail
        # each pool has an address space of its own, far from the other's
        start = _far(pool) if tail is None else tail.address + tail.size
        block = _Block(start, more, pool)
        block.before = tail
        if tail is not None:
            tail.behind = block
        self._by_address[start] = block
        self._tails[pool] = block
        return block

    def _reserve(self, size: int) -> None:
        if self.limit_bytes is not None and self.reserved_bytes + size > self.limit_bytes:
            self.empty_cache()
            if self.reserved_bytes + size > self.limit_bytes:
                raise MemoryError(size)
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.address + size, block.size - size, block.pool)
        rest.before, rest.behind = block, block.behind
        if block.behind is not None:
            block.behind.before = rest
        block.behind, block.size = rest, size
        self._by_address[rest.address] = rest
        if self._tails.get(block.pool) is block:
            self._tails[block.pool] = rest
        self._put(rest)

    def _absorb(self, block: _Block, following: _Block) -> None:
        block.size += following.size
        block.behind = following.behind
        if following.behind is not None:
            following.behind.before = block
        del self._by_address[following.address]
        if self._tails.get(block.pool) is following:
            self._tails[block.pool] = block

    def _put(self, block: _Block) -> None:
        bisect.insort(self._free[block.pool], (block.size, block.address))

    def _take(self, block: _Block) -> None:
        free = self._free[block.pool]
        del free[bisect.bisect_left(free, (block.size, block.address))]

    def _unmap(self, block: _Block) -> None:
        """Whole pages of a free block. Only at the end: pages unmapped in the middle can be mapped again, as new ones."""
        page = SMALL_SEGMENT if block.small else LARGE_SEGMENT
        whole = block.size // page * page
        if self._tails[block.pool] is not block or not whole:
            return
        self._take(block)
        self.reserved_bytes -= whole
        block.size -= whole
        if block.size:
            self._put(block)
            return
        del self._by_address[block.address]
        if block.before is None:
            del self._tails[block.pool]
            return
        self._tails[block.pool] = block.before
        block.before.behind = None


def _far(pool: _Pool) -> int:
    """Where a pool's addresses start: far from those of all others."""
    return (2 * pool[0] + pool[1]) << 60


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
    held: dict[int, tuple[_Block, int]] = {}
    streams = streams or {}
    refused = False
    for storage, delta in events:
        if not delta:
            continue
        old = held.pop(storage, None)
        size = delta + (old[1] if old else 0)
        if size > 0:
            try:
                held[storage] = allocator.malloc(size, streams.get(storage, 0)), size
            except MemoryError:
                refused = True
                break
        if old is not None:
            allocator.free(old[0])
    return Reserved(allocator.peak_allocated_bytes, allocator.peak_reserved_bytes, refused)
