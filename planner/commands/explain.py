"""dsplan explain: the page of one rule."""

from __future__ import annotations

from typing import Annotated

import typer
from dsplan.schemas.problem import Problem


def explain(rule: Annotated[str, typer.Argument(help="A rule id, for example DSP102, or a name.")]) -> None:
    """Print the page of one rule."""
    from dsplan.planner.rules import RULES
    from dsplan.planner.rules.near_names import nearest
    from dsplan.reports import rule_page

    named = {known.name: known for known in RULES.values()}
    found = RULES.get(rule.upper()) or named.get(rule.lower())
    if found is None:
        near = nearest(rule, named)
        hint = f"did you mean {near} ({named[near].id})?" if near else f"dsplan rules lists all {len(RULES)}"
        raise Problem(f"{rule} is no rule; {hint}")
    typer.echo(rule_page.page(found))
