"""The examples in the rules' docstrings, linted in the setting that they give."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from dsplan.planner.auditing.linting import lint_text
from dsplan.planner.auditing.project import Project
from dsplan.planner.rules import Rule
from dsplan.planner.rules.fit import Fit
from dsplan.planner.rules.models import ModelFacts
from dsplan.planner.rules.policy import Policy
from dsplan.schemas.cluster import parse_cluster
from dsplan.schemas.companion import Companion
from dsplan.schemas.finding import FileFindings
from dsplan.schemas.releases import NEWEST, Upgrade


def linted(rule: Rule, text: str) -> FileFindings:
    """The findings of an example, in the setting of its Given lines.

    Given: dp N, reader NAME, engine NAME, release X, from X (an upgrade to the newest), args.FIELD N, model.FIELD N, policy POINTER:SCHEMA (without spaces), or
    gib_per_sample N with usable_gib N (a model that takes so much per sample, and 5 % more at most), gib_offloaded N with host_gib N; else no cluster,
    DeepSpeed reads and runs it. args are those of the Trainer unless args.kind says otherwise. A Given that begins with "Good
    with" is the setting of Good, and the others are that of Bad.
    """
    given = _given(rule, text)
    arguments = {
        key.removeprefix("args."): _value(key, value) for key, value in given.items() if key.startswith("args.")
    }
    return lint_text(
        text.replace("\\ufeff", "\ufeff"),
        cluster=parse_cluster(given["dp"]) if "dp" in given else None,
        reader=given.get("reader", "deepspeed"),
        engine=given.get("engine", "deepspeed"),
        fit=_fit(given, text),
        facts=_facts(given),
        project=_project(given["policy"]) if "policy" in given else None,
        companion=Companion(**{"kind": "trainer", "source": "args.yaml", **arguments}) if arguments else None,
        release=given.get("release"),
        upgrade=Upgrade(before=given["from"], after=NEWEST) if "from" in given else None,
    )


def _facts(given: dict[str, str]) -> ModelFacts | None:
    told = {key.removeprefix("model."): _value(key, value) for key, value in given.items() if key.startswith("model.")}
    fields: dict[str, Any] = {"hidden_known": False, "hidden_size": None, "widest": None, "client_optimizer": None}
    return ModelFacts(**{**fields, "source": "model.py", **told}) if told else None


def _given(rule: Rule, text: str) -> dict[str, str]:
    lines, start = rule.section("Given"), "Good with "
    of_good = [line.removeprefix(start) for line in lines if line.startswith(start)]
    if not (of_good and text in rule.section("Good")):
        of_good = [line for line in lines if not line.startswith(start)]
    return dict(part.split() for line in of_good for part in line.rstrip(".").split(", "))


def _value(key: str, text: str) -> Any:
    """A number where it is one; a list of names for what Accelerate refuses."""
    if key == "args.beside_config_file":
        return (text,)
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def _project(text: str) -> Project:
    """A project with one policy."""
    pointer, _, schema = text.partition(":")
    policy = Policy(name="ours", pointer=pointer, schema=json.loads(schema))
    return Project(file="pyproject.toml", folder="/", text="", policies=(policy,))


def _fit(given: dict[str, str], text: str) -> Fit | None:
    if "gib_offloaded" in given:
        offloads = "offload_optimizer" in json.loads(text).get("zero_optimization", {})
        return Fit(
            gpu="GPU",
            device_bytes=0,
            device_bytes_high=0,
            usable_bytes=1,
            host_phase="train",
            host_bytes=int(given["gib_offloaded"]) * 2**30 if offloads else 0,
            host_memory_bytes=int(given["host_gib"]) * 2**30,
        )
    if "gib_per_sample" not in given:
        return None
    needed = int(given["gib_per_sample"]) * json.loads(text)["train_micro_batch_size_per_gpu"] * 2**30
    return Fit(
        gpu="GPU",
        device_bytes=needed,
        device_bytes_high=needed * 105 // 100,
        usable_bytes=int(given["usable_gib"]) * 2**30,
    )
