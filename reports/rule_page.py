"""The pages of the lint rules, all from their docstrings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Protocol


class RuleLike(Protocol):
    """What a page needs of a rule (planner.rules.Rule)."""

    @property
    def id(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def severity(self) -> str: ...
    @property
    def keys(self) -> tuple[str, ...]: ...
    @property
    def summary(self) -> str: ...
    @property
    def needs(self) -> tuple[str, ...]: ...
    @property
    def fix(self) -> str: ...
    @property
    def raises(self) -> str | None: ...
    def section(self, name: str) -> tuple[str, ...]: ...


FAMILIES = {
    "DSP0": "The text, the keys and their values",
    "DSP1": "Batch",
    "DSP2": "Precision",
    "DSP3": "ZeRO",
    "DSP4": "Offload",
    "DSP5": "Pipeline",
    "DSP6": "Optimizer",
    "DSP7": "Schedule",
    "DSP8": "Engine native",
    "DSP9": "Fit",
}

RAISES = {
    "load": "when the file is read",
    "parse": "when the reader makes its configuration of the file",
    "init": "when the engine starts",
    "step": "in training",
}
"""When the reader raises on what a rule finds, in words."""


def page(rule: RuleLike) -> str:
    """One rule's page, as `dsplan explain` prints it."""
    parts = [f"{rule.id} {rule.name} ({rule.severity})", "", rule.summary, ""]
    for heading in ("Why", "Given"):
        parts += [line for text in rule.section(heading) for line in (f"{heading}:", _indented(text), "")]
    for heading in ("Bad", "Good"):
        parts += [line for text in rule.section(heading) for line in (f"{heading}:", _indented(text), "")]
    parts += ["Raises:", _indented(RAISES[rule.raises]), ""] if rule.raises else []
    parts += ["Fix:", _indented(rule.section("Fix")[0] if rule.section("Fix") else "none"), ""]
    parts += ["Source:", *(_indented(text) for text in rule.section("Source"))]
    return "\n".join(parts)


def listing(rules: Sequence[RuleLike]) -> str:
    """One rule a line."""
    width = max(len(rule.name) for rule in rules)
    return "\n".join(f"{rule.id}  {rule.severity:7}  {rule.name:{width}}  {rule.summary}" for rule in rules)


def listing_json(rules: Sequence[RuleLike]) -> str:
    entries = [
        {
            "rule": rule.id,
            "name": rule.name,
            "severity": rule.severity,
            "summary": rule.summary,
            "fix": rule.fix,
            "raises": rule.raises,
            "keys": list(rule.keys),
        }
        for rule in rules
    ]
    return json.dumps({"version": 1, "rules": entries}, indent=2)


def document(rules: Sequence[RuleLike]) -> str:
    """docs/rules.md."""
    parts = [
        "# Lint rules",
        "",
        "Generated from the rules' docstrings by `make docs`. The severity is that of the usual case; some rules lower it, as their page says.",
        "`dsplan explain DSP102` prints one page, `dsplan rules` lists them all.",
    ]
    for prefix, family in FAMILIES.items():
        members = [rule for rule in rules if rule.id.startswith(prefix)]
        if not members:
            continue
        parts += ["", f"## {prefix}xx {family}"]
        for rule in members:
            parts += ["", f"### {rule.id} {rule.name}", "", f"*{rule.severity}, fix: {rule.fix}*", "", rule.summary]
            parts += [line for text in rule.section("Why") for line in ("", text)]
            parts += [line for text in rule.section("Given") for line in ("", f"Given: {text}")]
            for heading in ("Bad", "Good"):
                parts += [
                    line for text in rule.section(heading) for line in ("", f"{heading}:", "", "```json", text, "```")
                ]
            parts += ["", f"Raises: {RAISES[rule.raises]}."] if rule.raises else []
            fix = rule.section("Fix")
            parts += ["", f"Fix: {fix[0]}"] if fix and fix[0] != "none" else []
            parts += [line for text in rule.section("Source") for line in ("", f"Source: {text}")]
    return "\n".join(parts) + "\n"


def _indented(text: str) -> str:
    return "\n".join("    " + line for line in text.splitlines())
