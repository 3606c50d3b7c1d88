"""Fixes of lint: edits of the text that keep comments and layout, applied until none is left."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from pathlib import Path

from dsplan.schemas.finding import Edit, FileFindings
from dsplan.schemas.problem import Problem

Again = Callable[[str, str], FileFindings]
"""Lints (text, name) once more: `linting.linter` makes one."""
STDIN = "-"
MOST_PASSES = 20
"""Fixes that touch each other take a pass each; no file was seen to need more than three."""


def fix_text(found: FileFindings, *, unsafe: bool = False) -> str:
    """The file's text with the safe fixes of one pass applied. Fixes that touch each other wait for the next."""
    return _apply(found.text, [edit for edits in _chosen_edits(found, unsafe) for edit in edits])


def fix_all(found: FileFindings, again: Again) -> tuple[str, int]:
    """The text once no safe fix is left, and how many were applied."""
    fixed = 0
    for _ in range(MOST_PASSES):
        chosen = _chosen_edits(found, unsafe=False)
        if not chosen:
            break
        fixed += len(chosen)
        found = again(_apply(found.text, [edit for edits in chosen for edit in edits]), found.file)
    return found.text, fixed


def diff_of(files: Sequence[FileFindings], again: Again) -> str:
    """What the safe fixes would change, as a unified diff."""
    parts = []
    for found in files:
        before, after = found.text.splitlines(keepends=True), fix_all(found, again)[0].splitlines(keepends=True)
        for line in difflib.unified_diff(before, after, found.file, found.file):
            parts.append(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n")
    return "".join(parts)


def write_fixes(files: Sequence[FileFindings], again: Again) -> int:
    """Applies the safe fixes to the files. How many findings were fixed."""
    count = 0
    for found in files:
        if found.file == STDIN:
            raise Problem("--fix rewrites files, and - is stdin; use --diff, or name the file")
        text, fixed = fix_all(found, again)
        if not fixed:
            continue
        try:
            Path(found.file).write_bytes(text.encode("utf-8"))
        except OSError as error:
            raise Problem(f"{found.file}: cannot be written ({error.strerror or error})") from error
        count += fixed
    return count


def _chosen_edits(found: FileFindings, unsafe: bool) -> list[tuple[Edit, ...]]:
    chosen: list[tuple[Edit, ...]] = []
    taken: list[Edit] = []
    for finding in found.findings:
        if finding.fix is None or not (finding.fix.safe or unsafe):
            continue
        if all(edit.end <= other.start or other.end <= edit.start for edit in finding.fix.edits for other in taken):
            chosen.append(finding.fix.edits)
            taken += finding.fix.edits
    return chosen


def _apply(text: str, edits: list[Edit]) -> str:
    for edit in sorted(edits, key=lambda edit: edit.start, reverse=True):
        text = text[: edit.start] + edit.text + text[edit.end :]
    return text
