"""Whether the keys that ask for monitors, reports and compiling have values that can be meant."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
from dsplan import schemas

KEYS = (
    "steps_per_print", "dump_state", "wall_clock_breakdown", "memory_breakdown", "flops_profiler", "comms_logger",
    "tensorboard", "wandb", "csv_monitor", "comet", "activation_checkpointing",
)  # fmt: skip
OWN = ("compile", "meter_steps")
"""Of the dsplan block."""


def wrong_values(raw: Mapping[str, Any]) -> Iterator[tuple[str, bool, str]]:
    """(pointer, refused, text) of each value that has another type than schemas/ds_config.schema.json says."""
    folder = Path(next(iter(schemas.__path__)))
    known = json.loads((folder / "ds_config.schema.json").read_text("utf-8"))["properties"]
    own = raw.get("dsplan")
    asked: list[tuple[tuple[str, ...], Any, Any]] = [((name,), raw[name], known[name]) for name in KEYS if name in raw]
    if isinstance(own, Mapping):
        asked += [(("dsplan", name), own[name], known["dsplan"]["properties"][name]) for name in OWN if name in own]
    for path, value, schema in asked:
        if value in (None, "auto", float("inf")):
            continue
        for error in jsonschema.Draft202012Validator(schema).iter_errors(value):
            if error.validator in ("type", "enum", "minimum") and error.instance not in (None, "auto"):
                pointer = "/" + "/".join(map(str, (*path, *error.absolute_path)))
                wanted = (
                    error.validator_value
                    if isinstance(error.validator_value, (str, int))
                    else " or ".join(map(str, error.validator_value))
                )
                least = "at least " if error.validator == "minimum" else ""
                yield pointer, True, f" is {json.dumps(error.instance)}, but must be {least}{wanted}"
