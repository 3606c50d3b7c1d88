"""DSP090: a team's own rules, from [tool.dsplan.policy] of its pyproject.toml."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dsplan.planner.rules.known_keys import title
from dsplan.planner.rules.mechanism import ERROR, Hit, rule
from dsplan.schemas.positions import Document, shape
from dsplan.schemas.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dsplan.schemas.finding import Severity


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Policy:
    """What a team wants of one value: the JSON Schema fragment that it must satisfy where it is there."""

    name: str
    pointer: str
    schema: Mapping[str, Any]
    message: str = ""
    severity: Severity = ERROR
    required: bool = False
    """The value must be there."""
    home: str = "pyproject.toml"
    """The file that says so."""


@rule("DSP090", "policy-broken", severity=ERROR, keys=[])
def policy_broken(document: Document, policies: Sequence[Policy]) -> Iterator[Hit]:
    """The file must keep the policies that the team has written down in pyproject.toml.

    Why:    A team that has settled on a stage, a precision or a clipping value wants to hear of the file that leaves it.
            Values count as they are written. The policy says how severe a breach is, and whether an absent value is one.
    Given:  policy /zero_optimization/stage:{"enum":[2,3]}
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 1}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2}}
    Fix:    none
    Source: docs/teams.md, "Policies"
    """
    if not isinstance(document.value, dict):
        return
    for policy in policies:
        what = title(policy.pointer) or "the file"
        if document.has(policy.pointer):
            value = document.at(policy.pointer)
            broken = _broken(policy, value)
            said = f"{what} is {shape(value)}" if broken else ""
        else:
            broken = "must be set" if policy.required else ""
            said = f"{what} is not set"
        if broken:
            text = policy.message.rstrip(".") or broken
            yield Hit(policy.pointer, f"policy {policy.name}: {text} ({said})", severity=policy.severity)


def validator_of(policy: Policy) -> Any:
    """The policy's schema, ready to judge. Problem where it is no JSON Schema. References are never fetched."""
    return _validator(policy)


@functools.lru_cache(maxsize=256)  # by identity: a policy is compared with nothing
def _validator(policy: Policy) -> Any:
    import jsonschema  # here, since it takes as long to import as all of lint
    import referencing

    try:
        jsonschema.Draft202012Validator.check_schema(policy.schema)
    except jsonschema.SchemaError as error:
        place = ".".join(map(str, error.absolute_path))
        where = f" ({place})" if place else ""
        raise Problem(
            f"{policy.home}: policy {policy.name}: schema is no JSON Schema: {_line(error.message)}{where}"
        ) from error
    return jsonschema.Draft202012Validator(policy.schema, registry=referencing.Registry())


def _broken(policy: Policy, value: Any) -> str:
    """Why the value breaks the policy; empty where it keeps it."""
    try:
        error = next(iter(_validator(policy).iter_errors(value)), None)
    except Problem:
        raise
    except Exception as fault:  # a wrong pattern, a reference to nowhere or to itself: each a class of its own
        raise Problem(
            f"{policy.home}: policy {policy.name}: schema cannot be applied ({type(fault).__name__}: {_line(str(fault))})"
        ) from fault
    return _line(error.message) if error is not None else ""


def _line(text: str) -> str:
    short = " ".join(text.split())
    return short if len(short) <= 200 else short[:197] + "..."
