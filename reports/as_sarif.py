"""Reports as SARIF 2.1.0, which code scanning of GitHub, Azure DevOps and editors read."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from dsplan.reports import rule_page
from dsplan.reports.places import fingerprint, uri_of
from dsplan.schemas.positions import Lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dsplan.reports.rule_page import RuleLike
    from dsplan.schemas.finding import FileFindings, Finding, Span

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_LEVELS = {"error": "error", "warning": "warning", "info": "note"}


def findings(files: Sequence[FileFindings], rules: Sequence[RuleLike] = (), version: str = "") -> str:
    """One run with all findings. rules: those of lint, so that each finding points at its page; version: of dsplan.

    Source: SARIF 2.1.0 (OASIS), sections 3.14 run, 3.27 result, 3.30 region, 3.49 reportingDescriptor, 3.55 fix.
    """
    index_of = {rule.id: index for index, rule in enumerate(rules)}
    driver: dict[str, Any] = {"name": "dsplan", "rules": [_rule(rule) for rule in rules]}
    if version:
        driver["version"] = version
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "newlineSequences": ["\r\n", "\n", "\r"],
        "invocations": [{"executionSuccessful": True, "toolExecutionNotifications": list(_skipped(files))}],
        "results": list(_results(files, index_of)),
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2)


def _rule(rule: RuleLike) -> dict[str, Any]:
    return {
        "id": rule.id,
        "name": rule.name,
        "shortDescription": {"text": rule.summary},
        "fullDescription": {"text": " ".join([rule.summary, *rule.section("Why")])},
        "help": {"text": rule_page.page(rule), "markdown": rule_page.markdown(rule)},
        "defaultConfiguration": {"level": _LEVELS[rule.severity]},
        "properties": {"tags": ["deepspeed", rule_page.family(rule.id)]},
    }


def _skipped(files: Sequence[FileFindings]) -> Iterator[dict[str, Any]]:
    """The rules that could not run, as notes of the run."""
    needs = dict.fromkeys((skipped.rule, skipped.needs) for file in files for skipped in file.skipped_rules)
    for rule, need in needs:
        yield {"level": "note", "associatedRule": {"id": rule}, "message": {"text": f"{rule} skipped: it needs {need}"}}


def _results(files: Sequence[FileFindings], index_of: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    counts: dict[str, Counter[tuple[str, ...]]] = {}
    for file in files:
        lines, seen = Lines(file.text), counts.setdefault(file.path, Counter())
        more = [file.lasting_part] if file.part else []
        for finding in file.findings:
            place = {"artifactLocation": _artifact(file), "region": _region(finding.span)}
            result: dict[str, Any] = {
                "ruleId": finding.rule,
                "level": _LEVELS[finding.severity],
                "message": {"text": finding.message + (f"; {finding.remedy}" if finding.remedy else "")},
                "locations": [{"physicalLocation": place}],
                "partialFingerprints": {"rulePointer/v1": fingerprint(finding, seen, *more)},
                "properties": {"pointer": finding.pointer, "about": finding.about},
            }
            if finding.rule in index_of:
                result["ruleIndex"] = index_of[finding.rule]
            if finding.fix is not None:
                result["fixes"] = [_fix(file, finding, lines)]
            yield result


def _artifact(file: FileFindings) -> dict[str, str]:
    return {"uri": uri_of(file.path)}


def _region(span: Span) -> dict[str, int]:
    return {
        "startLine": span.line,
        "startColumn": span.column,
        "endLine": span.end_line,
        "endColumn": span.end_column,
    }


def _fix(file: FileFindings, finding: Finding, lines: Lines) -> dict[str, Any]:
    assert finding.fix is not None
    replacements = [
        {"deletedRegion": _region(lines.span(edit.start, edit.end)), "insertedContent": {"text": edit.text}}
        for edit in finding.fix.edits
    ]
    kind = "safe" if finding.fix.safe else "unsafe"
    return {
        "description": {"text": f"{finding.remedy or finding.message} ({kind})"},
        "artifactChanges": [{"artifactLocation": _artifact(file), "replacements": replacements}],
    }
