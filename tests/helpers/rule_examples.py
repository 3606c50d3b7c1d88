"""The examples in the rules' docstrings, linted in the setting that they give."""

from __future__ import annotations

from dsplan.planner.linting import lint_text
from dsplan.planner.rules import Rule
from dsplan.schemas.cluster import parse_cluster
from dsplan.schemas.companion import Companion
from dsplan.schemas.finding import FileFindings


def linted(rule: Rule, text: str) -> FileFindings:
    """The findings of an example. Given: dp N, reader NAME, engine NAME, args.FIELD N; else no cluster, DeepSpeed reads and runs it."""
    given = dict(part.split() for text in rule.section("Given") for part in text.rstrip(".").split(", "))
    arguments = {key.removeprefix("args."): int(value) for key, value in given.items() if key.startswith("args.")}
    return lint_text(
        text.replace("\\ufeff", "\ufeff"),
        cluster=parse_cluster(given["dp"]) if "dp" in given else None,
        reader=given.get("reader", "deepspeed"),
        engine=given.get("engine", "deepspeed"),
        companion=Companion(kind="trainer", source="args.yaml", **arguments) if arguments else None,  # type: ignore[arg-type]
    )
