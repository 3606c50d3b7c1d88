"""Which stand-ins have been called: the report names them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_LISTENING: list[list[tuple[str, str, str]]] = []


@contextmanager
def listening() -> Iterator[list[tuple[str, str, str]]]:
    """(package, function, remark) of each stand-in that is called meanwhile, each once, in order."""
    heard: list[tuple[str, str, str]] = []
    _LISTENING.append(heard)
    try:
        yield heard
    finally:
        _LISTENING.remove(heard)


def called(package: str, function: str, remark: str = "") -> None:
    for heard in _LISTENING:
        if (package, function, remark) not in heard:
            heard.append((package, function, remark))


def told(package: str, remark: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a stand-in, so that calls of it are heard under its own name."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            called(package, function.__name__, remark)
            return function(*args, **kwargs)

        return stand_in

    return decorate


def notes(heard: list[tuple[str, str, str]], why: Callable[[str], str]) -> list[str]:
    """A line per package: "flash_attn 2 is not installed: flash_attn_func stood in for"; why: of a package, why it is."""
    lines = []
    for package in dict.fromkeys(package for package, _, _ in heard):
        functions = dict.fromkeys(function for other, function, _ in heard if other == package)
        remarks = dict.fromkeys(remark for other, _, remark in heard if other == package and remark)
        lines.append("; ".join([f"{why(package)}: {', '.join(functions)} stood in for", *remarks]))
    return lines
