"""What the native engine makes of each key of a DeepSpeed JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

Level = Literal["error", "warning"]


def reasons(raw_config: Mapping[str, Any]) -> list[tuple[str, Level, str]]:
    return []
