"""Whether an optimizer's or schedule's values are of the kind that its parameters are annotated with, and in range."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping
from typing import Any


def wrong_kinds(maker: Callable[..., Any], values: Mapping[str, Any]) -> list[str]:
    """A text for each value that the maker's parameter of that name cannot mean. Other names are not looked at."""
    known = inspect.signature(maker).parameters
    found: list[str] = []
    for name, value in values.items():
        said = isinstance(value, (str, int, float, list, tuple, dict)) or value is None  # a script may give tensors too
        if name not in known or not said or value == "auto":
            continue
        must = _must(inspect.formatannotation(known[name].annotation), known[name].default, value)
        found += [f"{name} is {json.dumps(value, default=str)}, but must be {must}"] if must else []
    return found


def refuse_rates(lr: float, betas: tuple[float, float]) -> None:
    """ValueError where no optimizer can take them; torch's own look themselves."""
    if lr < 0 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"lr is {lr} and betas are {list(betas)}, but lr must be at least 0 and betas 0 to below 1")


def _must(annotation: str, default: Any, value: Any) -> str:
    """What the value should be; nothing where it is that, or where the annotation says nothing of numbers."""
    if value is None and (default is None or "None" in annotation):
        return ""
    if "PerGroup" in annotation:
        each = value if isinstance(value, (list, tuple)) else [value]
        return "" if all(map(_is_number, each)) else "a number, or a list with one for each group"
    if "tuple" in annotation.lower():
        two = isinstance(value, (list, tuple)) and len(value) == 2 and all(map(_is_number, value))
        return "" if two else "a list of two numbers"
    if "Iterable" in annotation or "list" in annotation.lower():
        return "" if isinstance(value, (list, tuple)) and all(map(_is_number, value)) else "a list of numbers"
    if "bool" in annotation:
        return "" if value in (True, False) else "true or false"
    if "float" in annotation:
        return "" if _is_number(value) else "a number"
    if "int" in annotation:
        return "" if _is_number(value) and value == int(value) else "a whole number"
    return ""


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
