"""Which rules --select and --ignore leave."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsplan.planner.auditing import suppressing
from dsplan.planner.rules import RULES, Rule
from dsplan.schemas.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Iterable


def chosen_rules(select: Iterable[str], ignore: Iterable[str]) -> list[Rule]:
    """The rules that --select and --ignore leave. An id, a name, or a beginning such as DSP1 or DSP10."""
    wanted, unwanted = list(select), list(ignore)
    check_known(wanted + unwanted)

    def matches(rule: Rule, pattern: str) -> bool:
        return suppressing.meant(pattern, rule.id, rule.name)

    chosen = [
        rule
        for rule in RULES.values()
        if (not wanted or any(matches(rule, pattern) for pattern in wanted))
        and not any(matches(rule, pattern) for pattern in unwanted)
    ]
    if not chosen:
        raise Problem("--select and --ignore leave no rule; take one of them back")
    return chosen


def check_known(patterns: Iterable[str]) -> None:
    """Problem where one is of no rule."""
    for pattern in dict.fromkeys(patterns):
        if not any(suppressing.meant(pattern, rule.id, rule.name) for rule in RULES.values()):
            raise Problem(f"{pattern!r} is no rule; dsplan rules lists them")
