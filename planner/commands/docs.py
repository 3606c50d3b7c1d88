"""dsplan docs (hidden): writes the generated pages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from dsplan.planner.terminal import CLEAN, FOUND, error

FOLDER = Path("docs/rules")


def docs(
    check: Annotated[bool, typer.Option("--check", help="Only say whether they are current.")] = False,
) -> None:
    """Write the generated pages of docs/ (from a checkout)."""
    from dsplan.planner.rules import RULES
    from dsplan.reports import rule_page

    pages = rule_page.documents(list(RULES.values()))
    if check:
        wrong = stale(pages, FOLDER)
        for name in wrong:
            error(f"{FOLDER / name} is not current; run make docs")
        raise typer.Exit(FOUND if wrong else CLEAN)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in stale(pages, FOLDER):
        if name in pages:
            (FOLDER / name).write_text(pages[name], "utf-8")
        else:
            (FOLDER / name).unlink()


def stale(pages: dict[str, str], folder: Path) -> list[str]:
    """The pages that differ from what they must be, are missing, or belong to no rule any more."""
    there = {file.name: file.read_text("utf-8") for file in folder.glob("*.md")}
    return sorted(name for name in pages.keys() | there.keys() if pages.get(name) != there.get(name))
