"""What the launcher tells its ranks, handed over as one JSON file named in the environment."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VARIABLE = "DSPLAN_ORDERS"


@dataclass(frozen=True, kw_only=True)
class Orders:
    """config is laid over the script's unless it is None. Ranks leave their records in folder."""

    config: dict[str, Any] | None
    source: str
    """Where config comes from, for messages."""
    strict: bool
    folder: str
    launcher_pid: int
    backend: str | None = None
    """Of the process group, whatever the script asks for."""
    timeout_seconds: float | None = None
    """Of each collective, likewise."""
    kept_batch: tuple[int, int] | None = None
    """After a restart: (global batch, micro-batch) of the first start, kept on any number of ranks."""
    model_params: int | None = None
    """Parameters of the model that the plan was made for."""

    @property
    def path(self) -> Path:
        """Its own for each launch."""
        return Path(self.folder) / "orders.json"

    def write(self) -> None:
        self.path.write_text(json.dumps(asdict(self)), "utf-8")


@functools.cache
def current_orders() -> Orders | None:
    """The orders of the launch that this process is a rank of; None outside of a launch."""
    path = os.environ.get(VARIABLE)
    return Orders(**json.loads(Path(path).read_text("utf-8"))) if path else None


def keep_batch(global_batch: int, micro_batch: int) -> None:
    """Under a launch: tell the launcher the batch, which a restart with fewer ranks has to keep."""
    orders = current_orders()
    if orders is not None and os.environ.get("RANK", "0") == "0":
        (Path(orders.folder) / "batch.json").write_text(json.dumps([global_batch, micro_batch]), "utf-8")


def with_kept_batch(raw: Mapping[str, Any], kept: tuple[int, int]) -> dict[str, Any]:
    """The config with the batches that the ranks of the first start had; accumulation follows from how many there are now."""
    fewer = {key: value for key, value in raw.items() if key != "gradient_accumulation_steps"}
    return {**fewer, "train_batch_size": kept[0], "train_micro_batch_size_per_gpu": kept[1]}


def read_batch(folder: Path) -> tuple[int, int] | None:
    """(global batch, micro-batch) of the ranks that were started; None where they did not come so far."""
    try:
        global_batch, micro_batch = json.loads((folder / "batch.json").read_text("utf-8"))
    except (OSError, ValueError):  # killed while it was written
        return None
    return int(global_batch), int(micro_batch)


def record_failure(orders: Orders, text: str, *, refused: bool = False, cause: str = "", explanation: str = "") -> None:
    """This rank's word on why it failed, for the launcher. explanation: who else is to blame, in one line."""
    record = {"time": time.time(), "text": text, "refused": refused, "cause": cause, "explanation": explanation}
    path = Path(orders.folder) / f"failure_{os.environ.get('RANK', '0')}.json"
    aside = path.with_suffix(".partial")
    aside.write_text(json.dumps(record), "utf-8")
    os.replace(aside, path)  # the rank may be killed at any moment


BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
PRECISION = ("fp16", "bf16", "bfloat16")
TYPED = ("optimizer", "scheduler")


def lay_over(script: Mapping[str, Any], ordered: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The script's config with the ordered one laid over it key by key, and one line per change.

    What must agree goes together: one ordered batch key drops the script's three, a precision switched on switches
    the others off, an optimizer or scheduler of another type comes with its params alone. "auto" orders nothing.
    """
    merged: dict[str, Any] = {key: value for key, value in script.items()}
    changes: list[str] = []
    if any(_said(ordered.get(key)) for key in BATCH):
        for key in BATCH:
            if key in merged and not _said(ordered.get(key)):
                changes.append(f"{key} {_show(merged.pop(key))} -> absent")
    on = [key for key in PRECISION if isinstance(ordered.get(key), Mapping) and ordered[key].get("enabled") is True]
    for key in PRECISION:
        block = merged.get(key)
        if on and key not in on and isinstance(block, Mapping) and block.get("enabled") not in (None, False):
            changes.append(f"{key}.enabled {_show(block['enabled'])} -> false")
            merged[key] = {**block, "enabled": False}
    for key in TYPED:
        mine, theirs = merged.get(key), ordered.get(key)
        if isinstance(mine, Mapping) and isinstance(theirs, Mapping) and mine.get("type") != theirs.get("type"):
            del merged[key]
            changes.append(f"{key} {mine.get('type')} -> {theirs.get('type')}")
    return _merge(merged, ordered, "", changes), changes


def _merge(mine: Mapping[str, Any], ordered: Mapping[str, Any], prefix: str, changes: list[str]) -> dict[str, Any]:
    merged = dict(mine)
    for key, value in ordered.items():
        old = merged.get(key)
        if isinstance(value, Mapping) and (isinstance(old, Mapping) or old is None):
            merged[key] = _merge(old or {}, value, f"{prefix}{key}.", changes)
        elif key not in merged or (_said(value) and old != value):
            if _said(value):
                changes.append(f"{prefix}{key} {_show(old) if key in merged else 'absent'} -> {_show(value)}")
            merged[key] = value
    return merged


def _said(value: Any) -> bool:
    return value is not None and value != "auto"


def _show(value: Any) -> str:
    return json.dumps(value)
