"""Findings that somebody has asked not to see: the file's own "dsplan": {"ignore": [...]}, and the ignores of a project."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dsplan.schemas.finding import Finding
    from dsplan.schemas.positions import Document

IGNORE = "/dsplan/ignore"


@dataclass(frozen=True, slots=True)
class Entry:
    """One member of the file's own list: where it stands, and the id, name or beginning of an id that it holds."""

    pointer: str
    pattern: str


def meant(pattern: str, id: str, name: str) -> bool:
    """The pattern is the rule's name, its id, or a beginning of the id such as DSP1 or DSP10."""
    return bool(pattern) and (name == pattern or id.startswith(pattern.upper()))


def own_entries(document: Document | None) -> list[Entry]:
    """Of the file's own list. What is no list, or no text, is for the rules on values."""
    listed = document.at(IGNORE) if document is not None else None
    if not isinstance(listed, list):
        return []
    return [Entry(f"{IGNORE}/{index}", entry) for index, entry in enumerate(listed) if isinstance(entry, str)]


def unused(
    entries: Iterable[Entry],
    findings: Sequence[Finding],
    ran: Iterable[tuple[str, str]],
    known: Iterable[tuple[str, str]],
) -> list[Entry]:
    """The entries that suppress nothing. One of whose rules (id, name) did not run is given the benefit of the doubt."""
    ran_here, all_known = set(ran), list(known)
    idle = []
    for entry in entries:
        rules = {rule for rule in all_known if meant(entry.pattern, *rule)}
        found = any(meant(entry.pattern, finding.rule, finding.name) for finding in findings)
        if rules and rules <= ran_here and not found:
            idle.append(entry)
    return idle


def sifted(findings: Sequence[Finding], patterns: Sequence[str]) -> tuple[tuple[Finding, ...], tuple[Finding, ...]]:
    """The findings that stay, and those that a pattern suppresses."""
    hidden = [any(meant(pattern, finding.rule, finding.name) for pattern in patterns) for finding in findings]
    return (
        tuple(finding for finding, out in zip(findings, hidden, strict=True) if not out),
        tuple(finding for finding, out in zip(findings, hidden, strict=True) if out),
    )
