"""Each rank's own file of tensors: planned by PyTorch's distributed checkpoint, written as safetensors piece by piece.

The file is what torch's HuggingFaceStorageWriter(save_distributed=True) writes, so that its reader reads it. Written here,
the rank holds no second copy of its shards, and the checksum is made on the way.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from dsplan.runtime.checkpoints.manifest import File
from dsplan.runtime.groups import carries_data
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

KINDS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""Names of dtypes. Source: safetensors/torch.py, _TYPES."""
_PIECE_BYTES = 16 << 20


@dataclass(frozen=True)
class Piece:
    """A part of a tensor that this rank writes. offsets: where it lies in the whole."""

    name: str
    offsets: tuple[int, ...]
    tensor: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


def own_pieces(tensors: Mapping[str, torch.Tensor]) -> list[Piece]:
    """What this rank is to write of them: its shards, and its fair share of what all ranks hold. Collective."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), is_coordinator=dist.get_rank() == 0)
    plans: list[SavePlan] = [planner.create_local_plan()] * dist.get_world_size()
    if len(plans) > 1 and carries_data():
        dist.all_gather_object(plans, plans[0])
    shared, _ = planner.create_global_plan(plans)
    pieces = []
    for item in planner.finish_plan(shared[dist.get_rank()]).items:
        assert item.tensor_data is not None
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, torch.Tensor)
        if tensor.numel() > 0 or item.tensor_data.size.numel() == 0:
            pieces.append(Piece(item.index.fqn, tuple(item.tensor_data.chunk.offsets), tensor.detach()))
    return sorted(pieces, key=lambda piece: piece.name)


def on_host(pieces: Sequence[Piece]) -> list[Piece]:
    """Copies that training does not change any more."""
    return [replace(piece, tensor=piece.tensor.to("cpu", copy=True)) for piece in pieces]


def file_name(rank: int) -> str:
    """As torch's writer names it: ranks count from 1."""
    return f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"


def write_pieces(path: Path, pieces: Sequence[Piece], tag: str) -> File:
    """The file, on disk (fsync) when this returns. OSError where it cannot be written; what there is of it is left."""
    header: dict[str, object] = {
        "__metadata__": {
            "format": "pt",
            "tag": tag,
            "DCP_VERSION": "1.0",
            "DCP_SHARDING_INFO": json.dumps({piece.name: {"saved_offsets": piece.offsets} for piece in pieces}),
        }
    }
    start = 0
    for piece in pieces:
        end = start + piece.num_bytes
        kind, shape = KINDS[piece.tensor.dtype], list(piece.tensor.shape)
        header[piece.name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8
    digest = hashlib.sha256()
    length = 0
    with open(path, "wb", buffering=0) as file:

        def write(data: bytes | memoryview) -> None:
            nonlocal length
            digest.update(data)
            view = memoryview(data)
            while len(view):
                view = view[file.write(view) or 0 :]
            length += len(data)

        write(len(text).to_bytes(8, "little") + text)
        for piece in pieces:
            held = piece.tensor.to("cpu").contiguous()
            view = memoryview((ctypes.c_char * piece.num_bytes).from_address(held.data_ptr())).cast("B")
            for first in range(0, len(view), _PIECE_BYTES):
                write(view[first : first + _PIECE_BYTES])
        os.fsync(file.fileno())
    return File(length, digest.hexdigest())
