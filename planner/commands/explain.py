"""dsplan explain: the page of one rule."""

from __future__ import annotations

from typing import Annotated

import typer
from dsplan.schemas.problem import Problem


def explain(rule: Annotated[str, typer.Argument(help="A rule id, for example DSP102.")]) -> None:
    """Print the page of one rule."""
    from dsplan.planner.rules import RULES
    from dsplan.reports import rule_page

    found = RULES.get(rule.upper())
    if found is None:
        raise Problem(f"{rule} is no rule; dsplan rules lists all {len(RULES)}")
    typer.echo(rule_page.page(found))
