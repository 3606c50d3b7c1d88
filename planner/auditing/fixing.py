"""Fixes of lint: edits of the text that keep comments and layout, applied until none is left."""

from __future__ import annotations

import os
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsplan.planner.auditing.sources import STDIN
from dsplan.schemas.finding import FileFindings, Finding
from dsplan.schemas.problem import Problem

Again = Callable[[str, str], FileFindings]
"""Lints (text, name) once more: `linting.linter` makes one."""
Key = tuple[str, str]
"""Rule and pointer: what makes two findings the same."""
MOST_PASSES = 20
"""Fixes that touch each other take a pass each; no file was seen to need more than three."""
MOST_LOOKED_AT = 20_000
"""Findings that are gone through again in search of the fixes to hold back: seconds; then all that are left are held back."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """A text once its fixes are applied. held_back: the fixes that would bring a finding which was not there before."""

    text: str
    count: int
    held_back: tuple[Finding, ...]


def fix_text(found: FileFindings, *, unsafe: bool = False) -> str:
    """The file's text with the fixes of one pass applied. Fixes that touch each other wait for the next."""
    return _apply(found.text, _apart([finding for finding in found.findings if _may_be_fixed(finding, unsafe)]))


def fix_all(found: FileFindings, again: Again, *, unsafe: bool = False) -> Fixed:
    """The text once no fix is left that may be applied. It has no finding that the first text had not."""
    fixed = _fix_together(found, again, unsafe)
    count, newly = fixed.count, fixed.count
    for _ in range(MOST_PASSES):
        if not newly or not fixed.held_back:
            break
        fixed = _fix_together(again(fixed.text, found.file), again, unsafe)  # what was held back may be welcome now
        count, newly = count + fixed.count, fixed.count
    return Fixed(fixed.text, count, fixed.held_back)


def _fix_together(found: FileFindings, again: Again, unsafe: bool) -> Fixed:
    """The largest part of the fixes that bring no finding beside each other, applied to the end."""
    before = _keys(found)
    wanted = [finding for finding in found.findings if _may_be_fixed(finding, unsafe)]
    first = {_key(finding) for finding in wanted}
    held_back: list[Finding] = []
    looked_at = 0

    def to_the_end(chosen: set[Key]) -> tuple[FileFindings, int]:
        """The text with the chosen fixes, and with those that they bring about, pass by pass."""
        now, count = found, 0
        for _ in range(MOST_PASSES):
            left_out = first - chosen
            fixes = _apart([one for one in now.findings if _may_be_fixed(one, unsafe) and _key(one) not in left_out])
            if not fixes:
                break
            now, count = again(_apply(now.text, fixes), now.file), count + len(fixes)
        return now, count

    def sieve(candidates: list[Finding], taken: set[Key]) -> set[Key]:
        """taken, and those of the candidates that bring no new finding beside them."""
        nonlocal looked_at
        more = taken | {_key(finding) for finding in candidates}
        if looked_at <= MOST_LOOKED_AT and _keys(to_the_end(more)[0]) <= before:
            return more
        looked_at += len(before)
        if len(candidates) == 1 or looked_at > MOST_LOOKED_AT:
            held_back.extend(candidates)
            return taken
        half = len(candidates) // 2
        return sieve(candidates[half:], sieve(candidates[:half], taken))

    now, count = to_the_end(sieve(wanted, set()) if wanted else set())
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
    count = 0
    held_back: list[Finding] = []
    for found in files:
        if found.file == STDIN:
            raise Problem("--fix rewrites files, and - is stdin; use --diff, or name the file")
        if os.path.exists(found.path) and not os.path.isfile(found.path):
            raise Problem(f"--fix rewrites files, and {found.path} is a pipe or a device; use --diff")
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


def _key(finding: Finding) -> Key:
    return finding.rule, finding.pointer


def _keys(found: FileFindings) -> set[Key]:
    return {_key(finding) for finding in found.findings}


def _may_be_fixed(finding: Finding, unsafe: bool) -> bool:
    return finding.fix is not None and (finding.fix.safe or unsafe)


def _apart(findings: Sequence[Finding]) -> list[Finding]:
    """Those whose edits touch none of the ones before: the others wait for the next pass."""
    chosen: list[Finding] = []
    taken: list[tuple[int, int]] = []  # sorted
    for finding in findings:
        spans = [(edit.start, edit.end) for edit in (finding.fix.edits if finding.fix else ())]
        if all(_free(taken, *span) for span in spans):
            chosen.append(finding)
            for span in spans:
                insort(taken, span)
    return chosen


def _free(taken: Sequence[tuple[int, int]], start: int, end: int) -> bool:
    """No span of the sorted ones, which touch each other nowhere, reaches into start..end."""
    at = bisect_left(taken, (start, start))
    return (at == 0 or taken[at - 1][1] <= start) and (at == len(taken) or end <= taken[at][0])


def _apply(text: str, findings: Sequence[Finding]) -> str:
    """The text with the findings' edits; new lines end as the text's own do."""
    windows = "\r\n" in text
    edits = [edit for finding in findings if finding.fix for edit in finding.fix.edits]
    for edit in sorted(edits, key=lambda edit: edit.start, reverse=True):
        new = edit.text.replace("\r\n", "\n").replace("\n", "\r\n") if windows else edit.text
        text = text[: edit.start] + new + text[edit.end :]
    return text
