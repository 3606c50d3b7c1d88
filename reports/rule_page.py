"""The pages of the lint rules, all from their docstrings."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence


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
    "DSP02": "The arguments beside the file",
    "DSP03": "The arguments beside the file",
    "DSP05": "Releases of DeepSpeed",
    "DSP06": "Suppressions",
    "DSP07": "Templates",
    "DSP08": "Readers that differ",
    "DSP09": "Policies",
    "DSP1": "Batch",
    "DSP2": "Precision",
    "DSP3": "ZeRO",
    "DSP4": "Offload",
    "DSP5": "Pipeline, tensor, sequence and expert parallelism",
    "DSP6": "Optimizer",
    "DSP7": "Schedule",
    "DSP80": "Engine native",
    "DSP8": "Other sections",
    "DSP9": "Fit",
}
"""What the rules whose ids begin so are about; of several beginnings the longest counts."""

NEEDS = {
    "cluster": "`--cluster` or `--world-size`",
    "companion": "`--args`",
    "filled": "`--args`",
    "fit": "`--model` and `--cluster`",
    "native": "`--engine native`",
    "policies": "`[tool.dsplan.policy]` in pyproject.toml",
}
"""What a rule may need beside the file, and the user gives. Other needs come from the file itself."""

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
    for heading, text in _facts(rule):
        if heading in ("readers", "raises", "needs", "releases"):
            parts += [f"{heading.capitalize()}:", _indented(text.replace("`", "")), ""]
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


def family(id: str) -> str:
    """What the rule is about, in words."""
    return FAMILIES[max((prefix for prefix in FAMILIES if id.startswith(prefix)), key=len)]


def documents(rules: Sequence[RuleLike]) -> dict[str, str]:
    """The files of docs/rules/: a page for each rule, and the index. Name to text."""
    return {"README.md": index(rules), **{f"{rule.id}.md": markdown(rule) for rule in rules}}


def index(rules: Sequence[RuleLike]) -> str:
    """docs/rules/README.md."""
    parts = [
        "# Lint rules",
        "",
        f"All {len(rules)}, generated from their docstrings by `make docs`. The severity is that of the usual case; some rules",
        "lower it, as their page says. `dsplan explain DSP102` prints a page, `dsplan rules` lists them all.",
    ]
    for title in dict.fromkeys(FAMILIES.values()):
        members = [rule for rule in rules if family(rule.id) == title]
        if members:
            parts += [
                "",
                f"## {title}",
                "",
                "| rule | name | severity | fix | what must hold |",
                "|---|---|---|---|---|",
            ]
            parts += [
                f"| [{rule.id}]({rule.id}.md) | {rule.name} | {rule.severity} | {rule.fix} | {_cell(rule.summary)} |"
                for rule in members
            ]
    return "\n".join(parts) + "\n"


def markdown(rule: RuleLike) -> str:
    """The rule's page in docs/rules/."""
    parts = [f"# {rule.id} {rule.name}", "", rule.summary, "", "| | |", "|---|---|"]
    parts += [f"| {name} | {text} |" for name, text in _facts(rule)]
    parts += [line for text in rule.section("Why") for line in ("", text)]
    parts += ["", "Keys: " + ", ".join(f"`{_dotted(key)}`" for key in rule.keys) + "."] if rule.keys else []
    parts += [line for text in rule.section("Given") for line in ("", f"Given: {text.rstrip('.')}.")]
    for heading in ("Bad", "Good"):
        parts += [line for text in rule.section(heading) for line in ("", f"{heading}:", "", "```json", text, "```")]
    fix = rule.section("Fix")
    parts += ["", f"Fix: {fix[0].rstrip('.')}."] if fix and " " in fix[0] else []
    parts += [line for text in rule.section("Source") for line in ("", f"Source: {text}")]
    return "\n".join(parts) + "\n"


def _facts(rule: RuleLike) -> list[tuple[str, str]]:
    """What the table at the head of a page says."""
    needs = list(dict.fromkeys(NEEDS[need] for need in rule.needs if need in NEEDS))
    releases = [f"{word} {text}" for word in ("Since", "Until") for text in rule.section(word)]
    facts = [("about", family(rule.id)), ("severity", rule.severity), ("readers", _readers(rule)), ("fix", rule.fix)]
    facts += [("raises", RAISES[rule.raises])] if rule.raises else []
    facts += [("needs", ", ".join(needs))] if needs else []
    facts += [("releases", ", ".join(releases).lower())] if releases else []
    return facts


def _readers(rule: RuleLike) -> str:
    given = " ".join(rule.section("Given"))
    if "reader accelerate" in given:
        return "Accelerate"
    hf = "reader trainer" in given or any(need in ("hf_reader", "companion", "filled") for need in rule.needs)
    return "HF Trainer, Accelerate" if hf else "DeepSpeed" if "reader deepspeed" in given else ", ".join(_ALL)


_ALL = ("DeepSpeed", "HF Trainer", "Accelerate")


def _dotted(pointer: str) -> str:
    return pointer.strip("/").replace("/", ".")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _indented(text: str) -> str:
    return "\n".join("    " + line for line in text.splitlines())
