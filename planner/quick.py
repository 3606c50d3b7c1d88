"""`dsplan lint FILE...` without typer, the import of which takes longer than the lint."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from dsplan.planner.terminal import CLEAN, FOUND
from dsplan.schemas.finding import READERS

if TYPE_CHECKING:
    from collections.abc import Sequence

VALUES = {"--for": ("auto", *READERS), "--format": ("text", "json", "github")}
"""The options that are read here, to what they may be."""


def quick_lint(arguments: Sequence[str]) -> int | None:
    """The exit code of a lint of nothing but files, --for and --format. None for any other line: typer is to read it."""
    if arguments[:1] != ["lint"]:
        return None
    files: list[str] = []
    chosen = {"--for": "auto", "--format": "text"}
    words = iter(arguments[1:])
    for word in words:
        if not word.startswith("-") or word == "-":
            files.append(word)
            continue
        name, equals, value = word.partition("=")
        value = value if equals else next(words, "")
        if value not in VALUES.get(name, ()):
            return None
        chosen[name] = value
    from dsplan.planner.auditing.linting import lint
    from dsplan.planner.auditing.project import fails

    found = lint(files or ["."], reader=chosen["--for"])
    more = {"color": sys.stdout.isatty()} if chosen["--format"] == "text" else {}
    report = import_module(f"dsplan.reports.as_{chosen['--format']}").findings(found, **more)
    if report:
        print(report)
    return FOUND if fails(found, None) else CLEAN
