"""dsplan rules: all of them in a list."""

from __future__ import annotations

from typing import Annotated

import typer
from dsplan.planner.options import TextOrJson


def rules(format: Annotated[TextOrJson, typer.Option("--format")] = TextOrJson.text) -> None:
    """List the rules of lint."""
    from dsplan.planner.rules import RULES
    from dsplan.reports import rule_page

    everything = list(RULES.values())
    typer.echo(rule_page.listing_json(everything) if format is TextOrJson.json else rule_page.listing(everything))
