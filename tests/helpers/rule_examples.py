"""The examples in the rules' docstrings, linted in the setting that they give."""

from __future__ import annotations

import json

from dsplan.planner.linting import lint_text
from dsplan.planner.rules import Rule
from dsplan.planner.rules.fit import Fit
from dsplan.schemas.cluster import parse_cluster
from dsplan.schemas.companion import Companion
from dsplan.schemas.finding import FileFindings


def linted(rule: Rule, text: str) -> FileFindings:
    """The findings of an example, in the setting of its Given lines.

    Given: dp N, reader NAME, engine NAME, args.FIELD N, or gib_per_sample N with usable_gib N (a model that takes so much
    per sample, and 5 % more at most); else no cluster, DeepSpeed reads and runs it.
    """
    given = dict(part.split() for text in rule.section("Given") for part in text.rstrip(".").split(", "))
    arguments = {key.removeprefix("args."): int(value) for key, value in given.items() if key.startswith("args.")}
    return lint_text(
        text.replace("\\ufeff", "\ufeff"),
        cluster=parse_cluster(given["dp"]) if "dp" in given else None,
        reader=given.get("reader", "deepspeed"),
        engine=given.get("engine", "deepspeed"),
        fit=_fit(given, text),
        companion=Companion(kind="trainer", source="args.yaml", **arguments) if arguments else None,  # type: ignore[arg-type]
    )


def _fit(given: dict[str, str], text: str) -> Fit | None:
    if "gib_per_sample" not in given:
        return None
    needed = int(given["gib_per_sample"]) * json.loads(text)["train_micro_batch_size_per_gpu"] * 2**30
    return Fit(
        gpu="GPU",
        device_bytes=needed,
        device_bytes_high=needed * 105 // 100,
        usable_bytes=int(given["usable_gib"]) * 2**30,
    )
