"""A document's meaning as rules need it: the DsConfig, as far as its values can be taken, and the ZeRO stage."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

from dsplan.schemas.config import AUTO, DsConfig, read_config
from dsplan.schemas.config import ConfigError as _ConfigError
from dsplan.schemas.positions import Document, steps

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dsplan.schemas.finding import Reader


def meaning(document: Document, reader: Reader, filled: Mapping[str, Any]) -> dict[str, Any]:
    """config and zero_stage, as far as they are known. A value that is wrong counts as absent: other rules speak of it."""
    if not isinstance(document.value, dict):
        return {}
    raw = copy.deepcopy(document.value)
    for pointer, value in document.walk():
        if isinstance(value, float) and not math.isfinite(value):
            _remove(raw, pointer)
    for pointer, value in filled.items():
        if document.at(pointer) == AUTO:
            _replace(raw, pointer, value)
    config = _tolerant(raw)
    if config is None:
        return {}
    found: dict[str, Any] = {"config": config}
    stage_filled = filled.get("/zero_optimization/stage") is not None
    if not (reader == "accelerate" and document.at("/zero_optimization/stage") == AUTO and not stage_filled):
        found["zero_stage"] = config.zero_stage
    return found


def _tolerant(raw: dict[str, Any]) -> DsConfig | None:
    for _ in range(100):
        try:
            return read_config(raw)
        except _ConfigError as error:
            for pointer, _ in error.reasons:
                _remove(raw, pointer)
    return None


def _remove(raw: Any, pointer: str) -> None:
    *path, last = steps(pointer) or [""]
    for step in path:
        raw = raw.get(step) if isinstance(raw, dict) else None
    if isinstance(raw, dict):
        raw.pop(last, None)


def _replace(raw: Any, pointer: str, value: Any) -> None:
    *path, last = steps(pointer)
    for step in path:
        raw = raw.get(step) if isinstance(raw, dict) else None
    if isinstance(raw, dict):
        raw[last] = value
