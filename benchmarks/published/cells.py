"""What single cells of a published row say: numbers, the memory and its kind, the GPU. A cell that is empty was not published."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from dsplan.schemas.cluster import USABLE_SHARE, Gpu, aliases, gpus
from dsplan.schemas.units import GB, GIB

Kind = Literal["allocated", "reserved", "device"]

COLUMNS = (
    "row_id", "model", "params_b", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq", "micro_batch", "grad_accum",
    "global_batch", "gpus", "gpu_type", "gpu_mem_gb", "framework", "method", "zero_stage", "sharding", "dp", "tp", "sp", "pp", "cp",
    "ep", "precision", "act_ckpt", "attn", "compile", "offload", "optimizer", "mem_value", "mem_unit", "mem_kind", "mem_scope",
    "outcome", "kind", "notes", "source",
)  # fmt: skip
"""Those that are read. A file may lack any of them: its rows do not say, then."""

NO = ("", "no", "none", "false", "off", "0", "n", "-", "unstated")


class Unmapped(Exception):
    """A row that no plan of ours stands for; its text is the reason."""


def whole(text: str) -> int | None:
    """The number of a cell as 8, 8.0 or 8,192; None for anything else."""
    text = re.sub(r"(?<=\d),(?=\d{3})", "", text.strip())
    return int(float(text)) if re.fullmatch(r"\d+(\.0+)?", text) else None


def number(row: Mapping[str, str], name: str, default: int | None = None) -> int:
    """One positive number, or what is meant where the row does not say."""
    found = whole(row[name])
    if found:
        return found
    if not row[name] and default is not None:
        return default
    raise Unmapped(f"{name} is not said" if not row[name] else f"{name} is not one number")


def decimal(text: str) -> float | None:
    """The number that a cell begins with, as in 6.738, ~40 or 7B; None where there is none."""
    found = re.match(r"[~≈]?\s*(\d+(?:\.\d+)?(?:e\d+)?)", re.sub(r"(?<=\d),(?=\d{3})", "", text.lower()))
    return float(found[1]) if found else None


def memory_of(row: Mapping[str, str]) -> tuple[float | None, Kind | None, bool | None]:
    """(bytes of one GPU, of which kind if it says more than "peak", whether it fitted)."""
    outcome = row["outcome"].lower()
    if outcome.startswith("init"):
        raise Unmapped("memory of the start, not of a step")
    if re.search(r"\boom|out of memory", outcome):
        return None, "device", False
    if not row["mem_value"]:
        if "fits in HBM" in row["notes"] or re.match(r"fits$|max (micro-)?batch that fits", outcome):
            return None, "device", True
        raise Unmapped("no memory and no label of fit")
    value = decimal(row["mem_value"])
    if not value:
        raise Unmapped("mem_value is not one number")
    said = row["mem_kind"].lower()
    if re.search(r"model init|@ init|after model setup|cpu", said):
        raise Unmapped("memory of the start, not of a step")
    device = re.search(r"nvidia-smi|gpu memory used|vram|process|gpu total|rocm-smi", said)
    value *= _unit(row["mem_unit"], device is not None) / _gpus_summed(row)
    if device:
        return value, "device", True
    if re.search(r"allocated|active|tracemalloc|memory_summary", said) and "reserved" not in said:
        return value, "allocated", True
    return value, "reserved" if "reserved" in said else None, True


def _unit(text: str, device: bool) -> float:
    """Bytes of the unit. nvidia-smi counts in MiB, whatever is written behind its numbers."""
    text = text.lower()
    if re.search(r"mib|2\^20", text):
        return GIB / 1024
    if re.search(r"gib|2\^30|1024\^3", text) or re.match(r"g\b", text):
        return GIB
    if text.startswith("gb"):
        return GIB if device else 1e9
    if text.startswith("mb"):
        return GIB / 1024 if device else 1e6
    raise Unmapped("no unit of memory")


def _gpus_summed(row: Mapping[str, str]) -> int:
    scope = row["mem_scope"].lower()
    if not re.match(r"(sum|total|all)\b", scope):
        return 1
    over = re.search(r"\d+", scope)
    return int(over[0]) if over else number(row, "gpus")


def gpu_of(row: Mapping[str, str]) -> Gpu | None:
    """The GPU of gpu_type, told by its model and its memory; None where ours are others."""
    text = re.sub(r"^\s*\d+\s*x\s*", "", re.sub(r"\s*[(,/].*", "", row["gpu_type"]), flags=re.IGNORECASE)
    text = re.sub(r"\b(nvidia|amd|tesla|geforce|quadro|dgx-?\d*)\b[ -]*", "", text, flags=re.IGNORECASE)
    text = re.sub(r"[\s_]+", "-", text.strip())
    memory = row["gpu_mem_gb"].strip()
    in_name = re.search(r"(\d+)-?gi?b", text, re.IGNORECASE)
    size = memory or (in_name[1] if in_name else "")
    text = re.sub(r"(\d+)-?gi?b", r"\1GB", text, flags=re.IGNORECASE)
    model = re.match(r"[A-Za-z]+-?\d+[A-Za-z]*", re.sub("RTX-", "RTX", text, flags=re.IGNORECASE))
    joined = re.sub(r"-\d+GB$", "", text)
    for pattern, short in (("RTX-", "RTX"), ("Titan-", "Titan"), ("-Ada", "Ada"), ("-Ti$", "Ti")):
        joined = re.sub(pattern, short, joined, flags=re.IGNORECASE)
    candidates = [text, re.sub("RTX-", "RTX", text, flags=re.IGNORECASE), joined]
    if model:
        candidates += [f"{model[0]}-{size}GB", model[0], re.sub("-", "", model[0])]
    for candidate in candidates:
        name = aliases().get(candidate.lower())
        if name:
            return _of_size(gpus()[name], size)
    return None


def _of_size(gpu: Gpu, memory: str) -> Gpu:
    """The card with the memory that the row names, where that is another."""
    said = decimal(memory)
    size = said * GB if said else gpu.memory_bytes
    if abs(size / gpu.memory_bytes - 1) < 0.03:
        return gpu
    return replace(gpu, name=f"{gpu.name.split('-')[0]}-{memory}GB", usable_bytes=round(USABLE_SHARE * size))
