"""Reports as GitLab's Code Quality JSON, which a merge request shows beside the changed lines."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from dsplan.reports.places import fingerprint, relative

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dsplan.schemas.finding import FileFindings

_SEVERITIES = {"error": "major", "warning": "minor", "info": "info"}


def findings(files: Sequence[FileFindings]) -> str:
    """A list, one entry a finding. Source: docs.gitlab.com, "Code Quality", section "Code Quality report format"."""
    seen = Counter[tuple[str, ...]]()
    return json.dumps([entry for file in files for entry in _entries(file, seen)], indent=2)


def _entries(file: FileFindings, seen: Counter[tuple[str, ...]]) -> Iterator[dict[str, Any]]:
    path = relative(file.path)
    for finding in file.findings:
        yield {
            "description": f"{finding.rule}: {finding.message}" + (f"; {finding.remedy}" if finding.remedy else ""),
            "check_name": finding.name,
            "fingerprint": fingerprint(finding, seen, path + file.lasting_part),
            "severity": _SEVERITIES[finding.severity],
            "location": {"path": path, "lines": {"begin": finding.span.line, "end": finding.span.end_line}},
        }
