"""Whether keys, above all those that ask for monitors, reports and compiling, have values that can be meant."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
from dsplan import schemas

KEYS = (
    "steps_per_print", "dump_state", "wall_clock_breakdown", "memory_breakdown", "flops_profiler", "comms_logger",
    "tensorboard", "wandb", "csv_monitor", "comet", "activation_checkpointing",
)  # fmt: skip
OWN = ("compile", "meter_steps", "stop_on_nan_loss", "halve_gradients_at_scale_growth")
"""Of the dsplan block."""
OF_ONE_TYPE = (
    "fp16", "bf16", "torch_autocast", "data_types", "zero_optimization", "communication_data_type", "prescale_gradients",
    "gradient_predivide_factor", "dataloader_drop_last", "zero_allow_untested_optimizer",
)  # fmt: skip
"""Whose types alone are looked at here: schemas/config.py and native_support judge the rest."""
LENIENT = re.compile(r"/(fp16|zero_optimization)(/.*)?|/(bf16|torch_autocast)/enabled")
"""Where DeepSpeed's pydantic, and schemas/config.py, take "true", 1 and "3" too."""
WORDS = ("true", "false", "yes", "no", "on", "off")


def wrong_values(raw: Mapping[str, Any]) -> Iterator[tuple[str, bool, str]]:
    """(pointer, refused, text) of each value that has another type than schemas/ds_config.schema.json says."""
    folder = Path(next(iter(schemas.__path__)))
    known = json.loads((folder / "ds_config.schema.json").read_text("utf-8"))["properties"]
    own = raw.get("dsplan")
    keys = (*KEYS, *OF_ONE_TYPE)
    asked: list[tuple[tuple[str, ...], Any, Any]] = [((name,), raw[name], known[name]) for name in keys if name in raw]
    if isinstance(own, Mapping):
        asked += [(("dsplan", name), own[name], known["dsplan"]["properties"][name]) for name in OWN if name in own]
    for path, value, schema in asked:
        if value in (None, "auto", float("inf")):
            continue
        judged = ("type",) if path[0] in OF_ONE_TYPE else ("type", "enum", "minimum")
        for error in jsonschema.Draft202012Validator(schema).iter_errors(value):
            pointer = "/" + "/".join(map(str, (*path, *error.absolute_path)))
            if error.validator not in judged or error.instance in (None, "auto") or _meant(pointer, error.instance):
                continue
            wanted = (
                error.validator_value
                if isinstance(error.validator_value, (str, int))
                else " or ".join(map(str, error.validator_value))
            )
            least = "at least " if error.validator == "minimum" else ""
            yield pointer, True, f" is {json.dumps(error.instance, default=str)}, but must be {least}{wanted}"


def _meant(pointer: str, value: Any) -> bool:
    """Whether DeepSpeed reads it as a boolean or a number there all the same."""
    if not LENIENT.fullmatch(pointer) or not isinstance(value, (str, int, float)):
        return False
    return not isinstance(value, str) or value.lower() in WORDS or value.replace(".", "", 1).isdigit()
