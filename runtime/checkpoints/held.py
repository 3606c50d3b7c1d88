"""Which tensors the safetensors files of a folder hold, from their headers alone: neither torch nor their bytes are needed."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from dsplan.schemas.problem import Problem


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
    kind: str
    """Of its numbers, as F32: safetensors' word."""
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def held_tensors(folder: Path) -> dict[str, Held]:
    """Of all safetensors in a folder, by name. Problem where a file cannot be read, or a part of a tensor is absent."""
    from safetensors import SafetensorError, safe_open

    chunks: dict[str, list[Chunk]] = {}
    kinds: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="np") as file:
                offsets = json.loads((file.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))
                for name in file.keys():  # noqa: SIM118
                    piece = file.get_slice(name)
                    shape = tuple(piece.get_shape())
                    start = tuple(offsets.get(name, {}).get("saved_offsets", [0] * len(shape)))
                    chunks.setdefault(name, []).append(Chunk(path, start, shape))
                    if kinds.setdefault(name, piece.get_dtype()) != piece.get_dtype():
                        raise Problem(f"{path}: holds {name} in another dtype than the other files")
        except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise Problem(f"{path}: is no whole safetensors file ({error})") from error
        except OSError as error:
            raise Problem(f"{path}: {error.strerror or error}") from error
    return {name: _whole(name, kinds[name], tuple(pieces)) for name, pieces in chunks.items()}


def _whole(name: str, kind: str, chunks: tuple[Chunk, ...]) -> Held:
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
    return Held(name, kind, shape, tuple(distinct.values()))
