"""The verbs: lint, estimate, tune. Each is imported when it is first asked for, so that lint never imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsplan.planner.auditing.linting import lint as lint
    from dsplan.planner.estimating import estimate as estimate
    from dsplan.planner.tuning import tune as tune

__all__ = ["estimate", "lint", "tune"]

_HOME = {"estimate": "estimating", "lint": "auditing.linting", "tune": "tuning"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"dsplan.planner.{_HOME[name]}"), name)
