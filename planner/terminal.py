"""What the commands share on the terminal: exit codes, notes and errors on stderr, progress."""

from __future__ import annotations

import sys
from typing import Any

import typer

CLEAN, FOUND, COULD_NOT_RUN = 0, 1, 2


def error(text: str) -> None:
    typer.echo(f"dsplan: error: {text}", err=True)


def note(text: str) -> None:
    typer.echo(f"dsplan: note: {text}", err=True)


def version() -> str:
    """Of dsplan, as it is installed; empty where it is not."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("dsplan")
    except PackageNotFoundError:
        return ""


class progress:
    """A spinner on stderr for what takes over two seconds; nothing where stderr is no terminal."""

    def __enter__(self) -> Any:
        self._status: Any = None
        if not sys.stderr.isatty():
            return lambda text: None
        from rich.console import Console

        self._status = Console(stderr=True).status("starting")
        self._status.start()
        return self._status.update

    def __exit__(self, *exception: object) -> None:
        if self._status is not None:
            self._status.stop()
