"""The commands, a file each. COMMANDS says which there are; only the one that is called is imported."""

from __future__ import annotations

from typing import Any

from dsplan.planner.options import GroupedCommand, LintCommand

_SCRIPT_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": False}
_LINE_FOLLOWS = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}

COMMANDS: dict[str, dict[str, Any]] = {
    "lint": {"cls": LintCommand},
    "check": {"context_settings": _LINE_FOLLOWS},
    "resolve": {},
    "diff": {},
    "estimate": {"cls": GroupedCommand, "context_settings": _SCRIPT_ARGUMENTS},
    "tune": {"cls": GroupedCommand, "context_settings": _SCRIPT_ARGUMENTS},
    "launch": {"context_settings": _LINE_FOLLOWS},
    "checkpoint": {},
    "explain": {},
    "rules": {},
    "schema": {},
    "docs": {"hidden": True},
}
"""Each command's name, which is also its module's and its function's, to how typer is to take it."""
