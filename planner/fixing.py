"""Fixes of lint: edits of the text that keep comments and layout, applied until none is left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsplan.planner.sources import STDIN
from dsplan.schemas.finding import Edit, FileFindings, Finding
from dsplan.schemas.problem import Problem

Again = Callable[[str, str], FileFindings]
"""Lints (text, name) once more: `linting.linter` makes one."""
MOST_PASSES = 20
"""Fixes that touch each other take a pass each; no file was seen to need more than three."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """A text once its fixes are applied. held_back: the fixes that would bring a finding which was not there before."""

    text: str
    count: int
    held_back: tuple[Finding, ...]


def fix_text(found: FileFindings, *, unsafe: bool = False) -> str:
    """The file's text with the fixes of one pass applied. Fixes that touch each other wait for the next."""
    return _apply(found.text, _fixable(found, unsafe, ()))


def fix_all(found: FileFindings, again: Again, *, unsafe: bool = False) -> Fixed:
    """The text once no fix is left that may be applied. It has no finding that the first text had not."""
    before = _keys(found)
    held_back: list[Finding] = []

    def to_the_end(chosen: list[Finding]) -> tuple[FileFindings, int]:
        """The text with the chosen fixes, and with those that they bring about, pass by pass."""
        now, count = found, 0
        for _ in range(MOST_PASSES):
            if not chosen:
                break
            now, count = again(_apply(now.text, chosen), now.file), count + len(chosen)
            chosen = _fixable(now, unsafe, held_back)
        return now, count

    def sieve(candidates: list[Finding], taken: list[Finding]) -> list[Finding]:
        """taken, and those of the candidates that bring no new finding beside them."""
        if _keys(to_the_end(taken + candidates)[0]) <= before:
            return taken + candidates
        if len(candidates) == 1:
            held_back.extend(candidates)
            return taken
        half = len(candidates) // 2
        return sieve(candidates[half:], sieve(candidates[:half], taken))

    candidates = _fixable(found, unsafe, ())
    now, count = to_the_end(sieve(candidates, []) if candidates else [])
    return Fixed(now.text, count, tuple(held_back))


def diff_of(files: Sequence[FileFindings], again: Again, *, unsafe: bool = False) -> str:
    """What the fixes would change, as a unified diff."""
    import difflib

    parts = []
    for found in files:
        fixed = fix_all(found, again, unsafe=unsafe).text
        before, after = found.text.splitlines(keepends=True), fixed.splitlines(keepends=True)
        for line in difflib.unified_diff(before, after, found.file, found.file):
            parts.append(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n")
    return "".join(parts)


def write_fixes(files: Sequence[FileFindings], again: Again, *, unsafe: bool = False) -> Fixed:
    """Applies the fixes to the files. How many, and what was held back; `text` is empty."""
    count, held_back = 0, []
    for found in files:
        if found.file == STDIN:
            raise Problem("--fix rewrites files, and - is stdin; use --diff, or name the file")
        fixed = fix_all(found, again, unsafe=unsafe)
        held_back += fixed.held_back
        if not fixed.count:
            continue
        try:
            Path(found.file).write_bytes(fixed.text.encode("utf-8"))
        except OSError as error:
            raise Problem(f"{found.file}: cannot be written ({error.strerror or error})") from error
        count += fixed.count
    return Fixed("", count, tuple(held_back))


def _keys(found: FileFindings) -> set[tuple[str, str]]:
    return {(finding.rule, finding.pointer) for finding in found.findings}


def _fixable(found: FileFindings, unsafe: bool, held_back: Sequence[Finding]) -> list[Finding]:
    """Findings with a fix to apply now: not held back before, and touching none that is chosen already."""
    refused = {(finding.rule, finding.pointer) for finding in held_back}
    chosen: list[Finding] = []
    taken: list[Edit] = []
    for finding in found.findings:
        if finding.fix is None or not (finding.fix.safe or unsafe) or (finding.rule, finding.pointer) in refused:
            continue
        if all(edit.end <= other.start or other.end <= edit.start for edit in finding.fix.edits for other in taken):
            chosen.append(finding)
            taken += finding.fix.edits
    return chosen


def _apply(text: str, findings: Sequence[Finding]) -> str:
    """The text with the findings' edits; new lines end as the text's own do."""
    windows = "\r\n" in text
    edits = [edit for finding in findings if finding.fix for edit in finding.fix.edits]
    for edit in sorted(edits, key=lambda edit: edit.start, reverse=True):
        new = edit.text.replace("\r\n", "\n").replace("\n", "\r\n") if windows else edit.text
        text = text[: edit.start] + new + text[edit.end :]
    return text
