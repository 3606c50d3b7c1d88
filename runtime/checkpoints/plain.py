"""Python values as JSON and back, without loss: what JSON has no form for is marked, and what cannot be told is refused."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

from dsplan.schemas.problem import Problem

MARKS = ("!tuple", "!items", "!counter", "!tensor")
"""An object with one of these as its only key stands for what JSON cannot say."""


MOST_DEEP = 64
"""Levels of containers: Python allows a thousand calls within each other, and each level takes several here and in json."""


def encode(value: Any, where: str, *, tensors: bool = False) -> Any:
    """What json.dumps takes. Problem that names the place, as `client_state["best"]["loss"]`, where it cannot be told.

    tensors: those of few numbers are told too, as lists (a learning rate that is a tensor, a step).
    """
    _refuse_endless(value, where)
    return _encoded(value, where, tensors=tensors)


def _refuse_endless(value: Any, where: str, depth: int = 0) -> None:
    """Problem where a container holds itself, or is nested too deep."""
    if depth > MOST_DEEP:
        raise Problem(f"{where} is nested more than {MOST_DEEP} deep, or holds itself, which JSON cannot hold")
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    for member in inside:
        _refuse_endless(member, where, depth + 1)


def _encoded(value: Any, where: str, *, tensors: bool) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    # numpy's float64, a member of an enumeration of words: what it is, whatever its class makes of str(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, list):
        return [_encoded(member, f"{where}[{index}]", tensors=tensors) for index, member in enumerate(value)]
    if isinstance(value, tuple):
        return {"!tuple": [_encoded(member, f"{where}[{i}]", tensors=tensors) for i, member in enumerate(value)]}
    if isinstance(value, Mapping):
        items = [(key, _encoded(member, f"{where}[{key!r}]", tensors=tensors)) for key, member in value.items()]
        if isinstance(value, Counter):
            return {"!counter": [[_encoded(key, where, tensors=tensors), member] for key, member in items]}
        if all(type(key) is str for key in value) and not (len(value) == 1 and items[0][0] in MARKS):
            return dict(items)
        return {"!items": [[_encoded(key, where, tensors=tensors), member] for key, member in items]}
    torch: Any = sys.modules.get("torch")  # inspecting files needs none
    if tensors and torch is not None and isinstance(value, torch.Tensor) and value.numel() <= 1024:
        return {"!tensor": [str(value.dtype).removeprefix("torch."), value.detach().tolist()]}
    raise Problem(f"{where} is {_what(value)}, which JSON cannot hold; {_remedy(value)}")


def decode(value: Any) -> Any:
    """The inverse of encode."""
    if isinstance(value, list):
        return [decode(member) for member in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((key, held),) = value.items()
        if key == "!tuple":
            return tuple(decode(member) for member in held)
        if key == "!items":
            return {decode(name): decode(member) for name, member in held}
        if key == "!counter":
            return Counter({decode(name): decode(member) for name, member in held})
        if key == "!tensor":
            import torch

            return torch.tensor(held[1], dtype=getattr(torch, held[0]))
    return {key: decode(member) for key, member in value.items()}


def _what(value: Any) -> str:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    shape = getattr(value, "shape", None)
    if shape is not None and (kind.__module__.startswith("torch") or (kind.__module__ == "numpy" and shape != ())):
        return f"a {name} of shape {list(shape)}"
    return f"a {name}"


def _remedy(value: Any) -> str:
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return "give its .item()"
    if hasattr(value, "tolist"):
        return "give its .tolist(), or save it in a file of its own"
    return "give numbers, words, lists and dicts"
