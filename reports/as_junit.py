"""Reports as JUnit XML: a suite for each file, a case for each finding and each rule that was skipped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsplan.reports.as_text import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dsplan.schemas.finding import FileFindings, Finding


def findings(files: Sequence[FileFindings]) -> str:
    """Errors and warnings are failures; what is good to know is a case that passes; a clean file is one such case."""
    suites = [_suite(file) for file in files]
    return "\n".join(
        ['<?xml version="1.0" encoding="utf-8"?>', '<testsuites name="dsplan lint">', *suites, "</testsuites>"]
    )


def _suite(file: FileFindings) -> str:
    cases = [*(_case(file.file, finding) for finding in file.findings), *_skipped(file)]
    if not file.findings:
        cases.insert(0, f"    <testcase{_attributes(classname=file.file, name='no findings')}/>")
    failures = sum(finding.severity != "info" for finding in file.findings)
    counts = _attributes(
        name=file.file,
        tests=str(len(cases)),
        failures=str(failures),
        errors="0",
        skipped=str(len(file.skipped_rules)),
    )
    return "\n".join([f"  <testsuite{counts}>", *cases, "  </testsuite>"])


def _case(name: str, finding: Finding) -> str:
    span = finding.span
    title = f"{finding.rule} {finding.name} {finding.pointer}".rstrip()
    text = finding.message + (f"; {finding.remedy}" if finding.remedy else "")
    placed = f"{name}:{span.line}:{span.column}: {finding.severity}: {text}"
    if finding.severity == "info":
        body = f"<system-out>{_escaped(placed)}</system-out>"
    else:
        body = f"<failure{_attributes(type=finding.severity, message=text)}>{_escaped(placed)}</failure>"
    return f"    <testcase{_attributes(classname=name, name=title)}>{body}</testcase>"


def _skipped(file: FileFindings) -> Iterator[str]:
    for skipped in file.skipped_rules:
        why = f"<skipped{_attributes(message=f'it needs {skipped.needs}')}/>"
        yield f"    <testcase{_attributes(classname=file.file, name=skipped.rule)}>{why}</testcase>"


def _attributes(**values: str) -> str:
    return "".join(f' {name}="{_escaped(value)}"' for name, value in values.items())


def _escaped(text: str) -> str:
    """For text and attributes. XML 1.0 has no way to hold a control character: `printable` replaces it."""
    for char, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ('"', "&quot;")):
        text = text.replace(char, entity)
    return printable(text)
