"""Which known name was meant by an unknown one."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is meant, or None where none is near enough.

    Near: the same but for case, spaces, - and _; or few edits away (one per four letters, three at most);
    or the one is the other's beginning or end, and most of it.
    """
    return _nearest(name, tuple(known)) if len(name) <= 80 else None


@dataclass(frozen=True, slots=True)
class _Known:
    """One name to be near to, and what is looked at before letters are compared one by one."""

    name: str
    plain: str
    letters: int


@functools.lru_cache(maxsize=1024)
def _table(names: tuple[str, ...]) -> tuple[_Known, ...]:
    longest_first = sorted(names, key=len, reverse=True)
    return tuple(_Known(name, plain := _plain(name), _letters(plain)) for name in longest_first)


@functools.lru_cache(maxsize=32768)
def _nearest(name: str, names: tuple[str, ...]) -> str | None:
    plain, table = _plain(name), _table(names)
    for other in table:
        if other.plain == plain:
            return other.name
    limit = min(max(len(plain) // 4, 1), 3)
    letters, size = _letters(plain), len(plain)
    close = [
        other
        for other in table
        if -limit <= len(other.plain) - size <= limit
        and len(other.name) > 2
        and (letters & ~other.letters).bit_count() <= limit
        and (other.letters & ~letters).bit_count() <= limit
    ]
    scored = sorted((edits(plain, other.plain, limit), other.name) for other in close)
    if scored and scored[0][0] <= limit:
        return scored[0][1]
    for other in table:
        short, long = (plain, other.plain) if size <= len(other.plain) else (other.plain, plain)
        if len(short) >= 0.6 * len(long) and len(short) > 6 and (long.startswith(short) or long.endswith(short)):
            return other.name
    return None


@functools.lru_cache(maxsize=4096)
def _plain(name: str) -> str:
    return "".join(char for char in name.lower() if char.isalnum())


def _letters(plain: str) -> int:
    """A bit for each letter's first, second and third time. An edit brings or takes one at most, so far sets mean far names."""
    once = twice = thrice = 0
    for char in plain:
        bit = 1 << ord(char) % 64
        thrice |= twice & bit
        twice |= once & bit
        once |= bit
    return once | twice << 64 | thrice << 128


def edits(left: str, right: str, limit: int) -> int:
    """Letters to insert, drop, change or swap with their neighbour; limit + 1 where it takes more.

    What both begin and end with is left out first, and only cells that `limit` edits can reach are filled.
    """
    left, right = _unshared(left, right)
    if abs(len(left) - len(right)) > limit:
        return limit + 1
    far, width = limit + 1, len(right)
    before: list[int] = []
    row = [min(j, far) for j in range(width + 1)]
    for i, char in enumerate(left, 1):
        now = [far] * (width + 1)
        if i <= limit:
            now[0] = i
        for j in range(max(i - limit, 1), min(i + limit, width) + 1):
            other = right[j - 1]
            cost = row[j - 1] if char == other else 1 + min(row[j], now[j - 1], row[j - 1])
            if i > 1 and j > 1 and char == right[j - 2] and left[i - 2] == other:
                cost = min(cost, before[j - 2] + 1)
            now[j] = cost
        if min(now) > limit:
            return far
        before, row = row, now
    return min(row[-1], far)


def _unshared(left: str, right: str) -> tuple[str, str]:
    """Both without the beginning and the end that they share."""
    most = min(len(left), len(right))
    start = 0
    while start < most and left[start] == right[start]:
        start += 1
    end = 0
    while end < most - start and left[-1 - end] == right[-1 - end]:
        end += 1
    return left[start : len(left) - end], right[start : len(right) - end]
