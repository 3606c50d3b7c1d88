"""What a process takes of a GPU beside its tensors: context, communicators, workspaces. Stated in gpus.json with their sources."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsplan.schemas.cluster import Gpu
from dsplan.schemas.units import GIB


@dataclass(frozen=True, slots=True)
class Span:
    """Likely bytes, what bounds them, and where they come from."""

    low: int
    likely: int
    high: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """Of one process on one GPU."""

    context: Span
    communicators: Span
    """Only where there is more than one rank."""
    matmul_workspace_bytes: int
    """Taken from the caching allocator, one per stream that multiplies."""


def overheads(gpu: Gpu | None) -> Overheads:
    """Those of a kind of GPU; of an unknown kind those of the older ones."""
    return _of_family(gpu.name.split("-")[0] if gpu else "")


@functools.cache
def _of_family(family: str) -> Overheads:
    raw = _raw()
    nvls, workspace = raw["communicators_nvls"], raw["matmul_workspace"]
    mib = workspace["hopper_mib"] if family in workspace["hopper"] else workspace["mib"]
    return Overheads(
        context=_span(raw["context"]),
        communicators=_span(nvls if family in nvls["gpus"] else raw["communicators"]),
        matmul_workspace_bytes=round(mib * (1 << 20)),
    )


@functools.cache
def _raw() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(__file__).with_name("gpus.json").read_text("utf-8"))["overheads"]
    return found


def _span(entry: dict[str, Any]) -> Span:
    low, likely, high = (round(entry[f"{name}_gib"] * GIB) for name in ("low", "likely", "high"))
    return Span(low, likely, high, entry["source"])
