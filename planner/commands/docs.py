"""dsplan docs (hidden): writes the generated pages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from dsplan.planner.terminal import CLEAN, FOUND, error


def docs(
    check: Annotated[bool, typer.Option("--check", help="Only say whether they are current.")] = False,
) -> None:
    """Write the generated pages of docs/ (from a checkout)."""
    from dsplan.planner.rules import RULES
    from dsplan.reports import rule_page

    page = Path("docs/rules.md")
    text = rule_page.document(list(RULES.values()))
    if check:
        current = page.is_file() and page.read_text("utf-8") == text
        if not current:
            error(f"{page} is not current; run make docs")
        raise typer.Exit(CLEAN if current else FOUND)
    page.write_text(text, "utf-8")
