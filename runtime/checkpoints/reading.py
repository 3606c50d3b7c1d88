"""A rank reads its own parts of tensors in safetensors, whoever wrote them, by PyTorch's distributed checkpoint.

Without collectives: what a rank reads is its own affair. Names and places come from the files' own headers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from dsplan.schemas.problem import Problem
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader


class Tensors:
    """What the safetensors files of a folder hold. shapes: of the whole tensors, by name."""

    def __init__(self, folder: Path):
        from safetensors import SafetensorError

        self._reader = HuggingFaceStorageReader(str(folder))
        try:
            self._metadata = self._reader.read_metadata()
        except (SafetensorError, ValueError, KeyError) as error:
            raise Problem(f"{folder}: a safetensors file there cannot be read ({error})") from error
        self.shapes: dict[str, tuple[int, ...]] = {
            name: tuple(entry.size)  # type: ignore[union-attr]
            for name, entry in self._metadata.state_dict_metadata.items()
        }

    def read_into(self, wanted: Mapping[str, torch.Tensor]) -> None:
        """Fill each tensor that is here, in place: of a DTensor this rank's shard. The dtype is that of the tensor."""
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(
            {name: tensor for name, tensor in wanted.items() if name in self.shapes},
            self._metadata,
            is_coordinator=True,
        )
        plan = planner.finish_plan(self._reader.prepare_local_plan(planner.create_local_plan()))
        self._reader.read_data(plan, planner).wait()
