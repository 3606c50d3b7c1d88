"""A value of the document as a rule wants it: a whole number, a number, an object, a switch of an unchecked block."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsplan.schemas.positions import Document


def whole(document: Document, pointer: str) -> int | None:
    """The whole number there; None where there is none, or something else."""
    value = document.at(pointer)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def number(value: Any) -> float | None:
    """The value where it is a finite number."""
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if real and abs(value) < 1e300 and math.isfinite(value) else None


def block(document: Document, pointer: str) -> dict[str, Any]:
    """The object there; empty where there is none."""
    value = document.at(pointer)
    return value if isinstance(value, dict) else {}


def truthy(document: Document, pointer: str) -> bool:
    """A switch that DeepSpeed takes as it stands: any text counts as on ("auto" too, which another rule speaks of)."""
    value = document.at(pointer)
    return bool(value) and value != "auto"
