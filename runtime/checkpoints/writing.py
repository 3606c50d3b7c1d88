"""Each rank's own file of tensors: planned by PyTorch's distributed checkpoint, written as safetensors piece by piece.

The file is what torch's HuggingFaceStorageWriter(save_distributed=True) writes, so that its reader reads it. Written here,
the rank holds no second copy of its shards, and the checksum is made on the way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from dsplan.runtime.checkpoints.manifest import File
from dsplan.runtime.checkpoints.safetensors_file import Part, write_file
from dsplan.runtime.groups import carries_data
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan


@dataclass(frozen=True)
class Piece:
    """A part of a tensor that this rank writes. offsets: where it lies in the whole."""

    name: str
    offsets: tuple[int, ...]
    tensor: torch.Tensor


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
    offsets = {piece.name: {"saved_offsets": piece.offsets} for piece in pieces}
    parts = [Part(piece.name, piece.tensor.dtype, tuple(piece.tensor.shape), piece.tensor.detach) for piece in pieces]
    return write_file(path, parts, {"tag": tag, "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)})
