"""Reports as markdown, for a comment or a job's summary: a table for each file."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dsplan.reports.as_text import printable, summary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsplan.schemas.finding import FileFindings, Finding

_SPECIAL = re.compile(r"[\\`*\[<|~]|(?<![^\W_])_|_(?![^\W_])")
"""What GitHub and GitLab would take for markup; a backslash before any punctuation is safe, and _ inside a word is none.

Source: CommonMark, sections 2.4 and 6.2; GFM, section 4.10.
"""


def findings(files: Sequence[FileFindings]) -> str:
    """The last line counts, as that of the text report does."""
    parts = ["\n".join([f"### {escaped(file.file)}", "", *_table(file)]) for file in files if file.findings]
    return "\n\n".join([*parts, escaped(summary(files))])


def _table(file: FileFindings) -> list[str]:
    return ["| line | severity | rule | message |", "|---:|---|---|---|", *map(_row, file.findings)]


def _row(finding: Finding) -> str:
    text = finding.message + (f"; {finding.remedy}" if finding.remedy else "")
    return f"| {finding.span.line} | {finding.severity} | {finding.rule} {finding.name} | {escaped(text)} |"


def escaped(text: str) -> str:
    """The text as it reads, with nothing in it that markdown takes for markup."""
    return _SPECIAL.sub(r"\\\g<0>", printable(text))
