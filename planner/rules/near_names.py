"""Which known name was meant by an unknown one."""

from __future__ import annotations

import functools
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is meant, or None where none is near enough.

    Near: the same but for case, spaces, - and _; or few edits away (one per four letters, three at most);
    or the one is the other's beginning or end, and most of it.
    """
    return _nearest(name, tuple(known)) if len(name) <= 80 else None


@functools.lru_cache(maxsize=1024)
def _nearest(name: str, names: tuple[str, ...]) -> str | None:
    plain = _plain(name)
    for other in names:
        if _plain(other) == plain:
            return other
    limit = min(max(len(plain) // 4, 1), 3)
    scored = sorted((edits(plain, _plain(other), limit), other) for other in names if len(other) > 2)
    if scored and scored[0][0] <= limit:
        return scored[0][1]
    for other in sorted(names, key=len, reverse=True):
        short, long = sorted((plain, _plain(other)), key=len)
        if len(short) >= 0.6 * len(long) and len(short) > 6 and (long.startswith(short) or long.endswith(short)):
            return other
    return None


@functools.lru_cache(maxsize=4096)
def _plain(name: str) -> str:
    return "".join(char for char in name.lower() if char.isalnum())


def edits(left: str, right: str, limit: int) -> int:
    """Letters to insert, drop, change or swap with their neighbour; limit + 1 where it takes more."""
    if abs(len(left) - len(right)) > limit:
        return limit + 1
    before: list[int] = []
    row = list(range(len(right) + 1))
    for i, char in enumerate(left, 1):
        now = [i]
        for j, other in enumerate(right, 1):
            cost = min(row[j] + 1, now[j - 1] + 1, row[j - 1] + (char != other))
            if i > 1 and j > 1 and char == right[j - 2] and left[i - 2] == other:
                cost = min(cost, before[j - 2] + 1)
            now.append(cost)
        if min(now) > limit:
            return limit + 1
        before, row = row, now
    return row[-1]
