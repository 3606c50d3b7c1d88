"""Reports as workflow commands of GitHub Actions, which show them beside the changed lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsplan.reports.as_text import printable
from dsplan.reports.places import relative

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsplan.schemas.finding import FileFindings, Finding

_COMMANDS = {"error": "error", "warning": "warning", "info": "notice"}


def findings(files: Sequence[FileFindings]) -> str:
    """One command a line. Columns only where they are of one line: GitHub refuses others. Source: docs.github.com, "Workflow commands for GitHub Actions"."""
    return "\n".join(_command(file.path, finding) for file in files for finding in file.findings)


def _command(file: str, finding: Finding) -> str:
    span = finding.span
    properties = {
        "file": printable(relative(file)),
        "line": str(span.line),
        "endLine": str(span.end_line),
        **({"col": str(span.column), "endColumn": str(span.end_column)} if span.line == span.end_line else {}),
        "title": f"{finding.rule} {finding.name}",
    }
    listed = ",".join(f"{name}={_property(value)}" for name, value in properties.items())
    message = finding.message + (f"; {finding.remedy}" if finding.remedy else "")
    return f"::{_COMMANDS[finding.severity]} {listed}::{_data(printable(message))}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
