"""Files of whole tensors, safetensors as Hugging Face names them, written one tensor at a time.

    model.safetensors                    where all fit into one file, else
    model-00001-of-00003.safetensors     and model.safetensors.index.json, which says what lies where

No more than one tensor is ever held: each is made when its turn comes, written and dropped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
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


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor in a file. offsets: where it lies in the whole."""

    path: Path
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Held:
    """A tensor as the files of a folder hold it, in one chunk or several."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def held_tensors(folder: Path) -> dict[str, Held]:
    """Of all safetensors in a folder, by name. Problem where a file cannot be read, or a part of a tensor is absent."""
    from safetensors import SafetensorError, safe_open

    dtypes = {kind: dtype for dtype, kind in KINDS.items()}
    chunks: dict[str, list[Chunk]] = {}
    kinds: dict[str, torch.dtype] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                offsets = json.loads((file.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))
                for name in file.keys():  # noqa: SIM118
                    piece = file.get_slice(name)
                    shape = tuple(piece.get_shape())
                    start = tuple(offsets.get(name, {}).get("saved_offsets", [0] * len(shape)))
                    chunks.setdefault(name, []).append(Chunk(path, start, shape))
                    if kinds.setdefault(name, dtypes[piece.get_dtype()]) != dtypes[piece.get_dtype()]:
                        raise Problem(f"{path}: holds {name} in another dtype than the other files")
        except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise Problem(f"{path}: is no whole safetensors file ({error})") from error
        except OSError as error:
            raise Problem(f"{path}: {error.strerror or error}") from error
    return {name: _whole(name, kinds[name], tuple(pieces)) for name, pieces in chunks.items()}


def _whole(name: str, dtype: torch.dtype, chunks: tuple[Chunk, ...]) -> Held:
    """Chunks must tile it: as many numbers as the box around them."""
    if any(len(chunk.shape) != len(chunks[0].shape) or len(chunk.offsets) != len(chunk.shape) for chunk in chunks):
        raise Problem(f"{chunks[0].path}: holds {name} with another number of dims than the other files")
    distinct = {(chunk.offsets, chunk.shape): chunk for chunk in chunks}  # what all ranks hold may lie there twice
    ends = [[start + size for start, size in zip(*place, strict=True)] for place in distinct]
    shape = tuple(max(sizes) for sizes in zip(*ends, strict=True))
    if sum(math.prod(size) for _, size in distinct) != math.prod(shape):
        raise Problem(
            f"{chunks[0].path.parent}: a part of {name} is in none of the files; one of another rank is absent"
        )
    return Held(name, dtype, shape, tuple(distinct.values()))


def read_held(held: Held, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The tensor whole, put together slice by slice; in another dtype where one is named."""
    from safetensors import safe_open

    whole = torch.empty(held.shape, dtype=dtype or held.dtype)
    for chunk in held.chunks:
        with safe_open(chunk.path, framework="pt") as file:
            piece = file.get_tensor(held.name)
        whole[tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.shape, strict=True))] = piece
    return whole
