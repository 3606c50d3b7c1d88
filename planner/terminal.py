"""What the commands share on the terminal: exit codes, notes and errors on stderr, progress."""

from __future__ import annotations

import sys
from typing import Any, Protocol

CLEAN, FOUND, COULD_NOT_RUN = 0, 1, 2


def error(text: str) -> None:
    _say(f"dsplan: error: {text}")


def note(text: str) -> None:
    _say(f"dsplan: note: {text}")


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def version() -> str:
    """Of dsplan, as it is installed; empty where it is not."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("dsplan")
    except PackageNotFoundError:
        return ""


class Told(Protocol):
    """Takes what is being done, and how much `of` it is done where that is counted."""

    def __call__(self, text: str, done: int = 0, of: int | None = None) -> None: ...


def quiet(text: str, done: int = 0, of: int | None = None) -> None:
    """Tells nobody."""


class progress:
    """What is being done, on stderr while it takes; a bar where it is counted. Nothing where stderr is no terminal."""

    def __enter__(self) -> Told:
        self._bar: Any = None
        if not sys.stderr.isatty():
            return quiet
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        task = self._bar.add_task("starting", total=None)
        self._bar.start()

        def told(text: str, done: int = 0, of: int | None = None) -> None:
            self._bar.update(task, description=text, completed=done, total=of)

        return told

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()
