"""Files of whole tensors, safetensors as Hugging Face names them, written one tensor at a time.

    model.safetensors                    where all fit into one file, else
    model-00001-of-00003.safetensors     and model.safetensors.index.json, which says what lies where

No more than one tensor is ever held: each is made when its turn comes, written and dropped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from dsplan.runtime.checkpoints.held import Held
from dsplan.runtime.checkpoints.manifest import File, write_whole
from dsplan.runtime.checkpoints.safetensors_file import KINDS, Part, write_file
from dsplan.schemas.problem import Problem

INDEX = "model.safetensors.index.json"


def divided(parts: Sequence[Part], most_bytes: int) -> list[list[Part]]:
    """In their order, filled up to most_bytes each; a tensor that is larger has a file to itself. At least one file."""
    files: list[list[Part]] = [[]]
    filled = 0
    for part in parts:
        if files[-1] and filled + part.num_bytes > most_bytes:
            files.append([])
            filled = 0
        files[-1].append(part)
        filled += part.num_bytes
    return files


def write_parts(folder: Path, parts: Sequence[Part], most_bytes: int, metadata: Mapping[str, str]) -> dict[str, File]:
    """Every file that was written, by name. OSError where one cannot be."""
    files = divided(parts, most_bytes)
    written: dict[str, File] = {}
    places: dict[str, str] = {}
    for index, members in enumerate(files):
        name = "model.safetensors" if len(files) == 1 else f"model-{index + 1:05d}-of-{len(files):05d}.safetensors"
        written[name] = _write(folder / name, members, metadata)
        places |= {part.name: name for part in members}
    if len(files) > 1:
        total = sum(part.num_bytes for part in parts)
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2) + "\n"
        written[INDEX] = write_whole(folder / INDEX, text)
    return written


def _write(path: Path, parts: Sequence[Part], metadata: Mapping[str, str]) -> File:
    """The widest dtypes first, so that each tensor begins at a multiple of its numbers' size."""
    return write_file(path, sorted(parts, key=lambda part: -part.dtype.itemsize), metadata)


def dtype_of(held: Held) -> torch.dtype:
    for dtype, kind in KINDS.items():
        if kind == held.kind:
            return dtype
    raise Problem(f"{held.chunks[0].path}: holds {held.name} as {held.kind}, which is not read")


def read_held(held: Held) -> torch.Tensor:
    """The tensor whole, put together slice by slice."""
    from safetensors import safe_open

    whole = torch.empty(held.shape, dtype=dtype_of(held))
    for chunk in held.chunks:
        with safe_open(chunk.path, framework="pt") as file:
            piece = file.get_tensor(held.name)
        whole[tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.shape, strict=True))] = piece
    return whole
