"""Resolved configurations, and what differs between two of them, as text and as JSON."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from dsplan.reports.as_text import printable
from dsplan.schemas.positions import steps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsplan.schemas.resolved import Comparison, Held, Resolved

_HANDED = {
    "deepspeed": "as DeepSpeed 0.19.8 holds it",
    "trainer": "as DeepSpeed 0.19.8 holds it under the HF Trainer",
    "accelerate": "as DeepSpeed 0.19.8 holds it under Accelerate",
}
_WIDTH = 44
"""Characters of a value that are shown; the JSON has all."""


def resolved(value: Resolved) -> str:
    """A line for each value: key, value, where it is from."""
    gpus = "" if value.ranks is None else f", dp {value.ranks}"
    rows = [(_title(held.pointer), shown(held.value), _from(held)) for held in value.values]
    return "\n".join(
        [f"{printable(value.file)}, {_HANDED[value.read_as]}{gpus}", *_table(("key", "value", "from"), rows)]
    )


def resolved_json(value: Resolved) -> str:
    return json.dumps(
        {
            "version": 1,
            "file": value.file,
            "read_as": value.read_as,
            "dp": value.ranks,
            "refused": list(value.refusals),
            "values": [{"pointer": held.pointer, **_side(held)} for held in value.values],
        },
        indent=2,
    )


def comparison(value: Comparison) -> str:
    """A line for each key that differs, with both values and origins; the last line is the verdict."""
    first, second = (f"{printable(one.file)}, {_HANDED[one.read_as]}" for one in (value.a, value.b))
    parts = [f"A  {first}", f"B  {second}"]
    rows = [
        (
            ("* " if difference.decides else "  ") + _title(difference.pointer),
            _shown_side(difference.a),
            _shown_side(difference.b),
        )
        for difference in value.differences
    ]
    if rows:
        parts += ["", *_table(("  key", "A", "B"), rows)]
        if any(difference.decides for difference in value.differences):
            parts.append("* decides what is trained")
    else:
        parts.append("no value differs")
    verdict = "yes" if value.same_model else "no"
    return "\n".join([*parts, "", f"trains the same model: {verdict}, because {'; '.join(value.because)}"])


def comparison_json(value: Comparison) -> str:
    return json.dumps(
        {
            "version": 1,
            "a": {"file": value.a.file, "read_as": value.a.read_as},
            "b": {"file": value.b.file, "read_as": value.b.read_as},
            "differences": [
                {
                    "pointer": difference.pointer,
                    "decides": difference.decides,
                    "a": None if difference.a is None else _side(difference.a),
                    "b": None if difference.b is None else _side(difference.b),
                }
                for difference in value.differences
            ],
            "same_model": value.same_model,
            "because": list(value.because),
        },
        indent=2,
    )


def shown(value: Any) -> str:
    """A value on one line, as JSON writes it."""
    text = json.dumps(value) if value != math.inf else "infinity"
    return printable(text if len(text) <= _WIDTH else text[: _WIDTH - 3] + "...")


def _side(held: Held) -> dict[str, Any]:
    return {
        "value": "infinity" if held.value == math.inf else held.value,
        "origin": held.origin,
        "note": held.note,
    }


def _shown_side(held: Held | None) -> str:
    return "not there" if held is None else f"{shown(held.value)}  ({_from(held)})"


def _from(held: Held) -> str:
    return printable(f"{held.origin}: {held.note}" if held.note else held.origin)


def _title(pointer: str) -> str:
    return printable(".".join(steps(pointer)))


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[index]) for row in [head, *rows]) for index in range(len(head) - 1)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in [head, *rows]
    ]
