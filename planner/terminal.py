"""What the commands share on the terminal: exit codes, notes and errors on stderr, progress."""

from __future__ import annotations

import sys
from typing import Any

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
