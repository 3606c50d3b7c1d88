"""Reports as JSON, for scripts and CI."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsplan.schemas.finding import FileFindings, Finding


def findings(files: Sequence[FileFindings]) -> str:
    """Lines and columns are 1-based and count characters; the end is exclusive."""
    return json.dumps(_report(files), indent=2)


def statistics(files: Sequence[FileFindings]) -> str:
    """The same, and how often each rule found something."""
    counts = Counter(finding.rule for file in files for finding in file.findings)
    ordered = dict(sorted(counts.items(), key=lambda entry: (-entry[1], entry[0])))
    return json.dumps({**_report(files), "statistics": ordered}, indent=2)


def _report(files: Sequence[FileFindings]) -> dict[str, Any]:
    return {"version": 1, "files": [_file(file) for file in files]}


def _file(file: FileFindings) -> dict[str, Any]:
    return {
        "file": file.file,
        "read_as": file.read_as,
        "findings": [_finding(finding) for finding in file.findings],
        "skipped_rules": [{"rule": skipped.rule, "needs": skipped.needs} for skipped in file.skipped_rules],
    }


def _finding(finding: Finding) -> dict[str, Any]:
    message = finding.message + (f"; {finding.remedy}" if finding.remedy else "")
    return {
        "rule": finding.rule,
        "name": finding.name,
        "severity": finding.severity,
        "pointer": finding.pointer,
        "line": finding.span.line,
        "column": finding.span.column,
        "end_line": finding.span.end_line,
        "end_column": finding.span.end_column,
        "message": message,
        "about": finding.about,
        "raises": finding.raises,
        "fix": None if finding.fix is None else "safe" if finding.fix.safe else "unsafe",
    }
