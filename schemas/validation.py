"""Values against the JSON Schemas of this folder: every reason at once, each naming where it lies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def schema_errors(name: str, value: Any) -> list[str]:
    """What is wrong with the value under schemas/NAME.schema.json, as "layout.tp: 0 is less than the minimum of 1"."""
    import jsonschema  # here, since it takes as long to import as all of lint

    schema = json.loads(Path(__file__).with_name(f"{name}.schema.json").read_text("utf-8"))
    found = jsonschema.Draft202012Validator(schema).iter_errors(value)
    return [_text(error) for error in sorted(found, key=lambda error: list(map(str, error.absolute_path)))]


def _text(error: Any) -> str:
    while error.context:  # of several forms, the one that came nearest
        error = max(error.context, key=lambda inner: len(inner.absolute_path))
    place = ".".join(map(str, error.absolute_path))
    return f"{place}: {error.message}" if place else str(error.message)
