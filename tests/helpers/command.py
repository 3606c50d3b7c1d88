"""The command line, called in this process: exit code, stdout, stderr."""

import contextlib
import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from dsplan.planner import cli


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


def dsplan(*arguments: str) -> Done:
    """What `dsplan ARGUMENTS` would print and return."""
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    with _argv(["dsplan", *arguments]), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code
    return Done(int(code or 0) if not isinstance(code, str) else 1, out.getvalue(), err.getvalue())  # type: ignore[call-overload]


@contextlib.contextmanager
def _argv(words: list[str]) -> Iterator[None]:
    kept, sys.argv = sys.argv, words
    try:
        yield
    finally:
        sys.argv = kept
