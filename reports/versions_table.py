"""Which releases of DeepSpeed take a configuration: a table, or JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsplan.schemas.acceptance import Acceptance, Verdict


def text(files: Sequence[Acceptance]) -> str:
    """A table for each file, a release a line."""
    from tabulate import tabulate

    parts = []
    for file in files:
        rows = [
            (each.release, _word(each), each.first.rule if each.first else "", _why(each)) for each in file.verdicts
        ]
        table = tabulate(rows, headers=("DeepSpeed", "takes it", "rule", "first error"), disable_numparse=True)
        parts.append(f"{file.file}\n" + "\n".join(line.rstrip() for line in table.splitlines()))
    return "\n\n".join(parts)


def as_json(files: Sequence[Acceptance]) -> str:
    entries = [
        {
            "file": file.file,
            "releases": [
                {
                    "release": each.release,
                    "accepts": each.accepts,
                    "errors": each.errors,
                    "rule": each.first.rule if each.first else None,
                    "pointer": each.first.pointer if each.first else None,
                    "line": each.first.span.line if each.first else None,
                    "message": each.first.message if each.first else None,
                }
                for each in file.verdicts
            ],
        }
        for file in files
    ]
    return json.dumps({"version": 1, "files": entries}, indent=2)


def _word(verdict: Verdict) -> str:
    return "yes" if verdict.accepts and not verdict.errors else "with errors" if verdict.accepts else "no"


def _why(verdict: Verdict) -> str:
    return f"line {verdict.first.span.line}: {verdict.first.message}" if verdict.first else ""
