"""What one rank meets is told to all, so that none waits for one that has given up."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from dsplan.runtime.groups import carries_data
from dsplan.schemas.problem import Problem

T = TypeVar("T")


def together(action: Callable[[], T]) -> T:
    """The action's value on this rank. Problem on every rank where it failed on one, with that rank's line. Collective."""
    value, line, cause = attempt(action)
    refuse_together(line, cause)
    assert value is not None
    return value[0]


def attempt(action: Callable[[], T]) -> tuple[tuple[T] | None, str | None, BaseException | None]:
    """((value,), None, None), or (None, one line on what went wrong, the error)."""
    try:
        return (action(),), None, None
    except Exception as error:
        return None, line_of(error), error


def line_of(error: Exception) -> str:
    if isinstance(error, Problem):
        return str(error)
    if isinstance(error, OSError):
        words = error.strerror or str(error)
        return f"{error.filename}: {words}" if error.filename else words
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"


def refuse_together(line: str | None, cause: BaseException | None = None) -> None:
    """Problem on every rank where one rank has a line to tell, with its number where others had none. Collective."""
    lines = told_by_all(line)
    failed = [(rank, text) for rank, text in enumerate(lines) if text is not None]
    if not failed:
        return
    rank, text = failed[0]
    alone = len(lines) > 1 and any(other != text for other in lines)
    raise Problem(f"rank {rank}: {text}" if alone else text) from cause


def refuse_with_first(line: str | None) -> None:
    """Problem on every rank where rank 0, which speaks for all, has a line to tell. Collective."""
    told = told_by_all(line)[0]
    if told is not None:
        raise Problem(told)


def told_by_all(text: str | None) -> list[str | None]:
    """By rank. Collective."""
    if dist.get_world_size() == 1 or not carries_data():
        return [text]
    lines: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(lines, text)
    return lines
