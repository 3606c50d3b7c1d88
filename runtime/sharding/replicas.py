"""Stage 0 without copies: FSDP2's `replicate` gathers over one rank, and reduces twice in buffers of its own.

Where masters have the compute dtype a module may run on them as they lie, and one buffer carries gradients from the flat
input of the reduction to the optimizer. Source: torch 2.13, torch/distributed/fsdp/_fully_shard/{_fsdp_param_group,
_fsdp_collectives}.py, whose private names are what there is to ask for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter


def run_in_place(units: Iterable[FSDPModule]) -> None:
    """What a module computes with lies in the storage of its masters where both have one dtype; no reduction copies.

    The masters must lie on the device. A tensor that is copied into itself is left alone.
    """
    for unit in units:
        for group in unit._get_fsdp_state()._fsdp_param_groups:
            group._reduce_scatter_comm = _InPlace()
            for held in group.fsdp_params:
                if held.param_dtype is None:
                    held.all_gather_outputs = [held._sharded_param_data]
                    held.free_unsharded_param = _keep  # type: ignore[method-assign]


def _keep() -> None:
    """The gathered copy is the master."""


class _InPlace(ReduceScatter):
    """Where one rank holds all of a gradient nothing is scattered: the output is the input."""

    def __init__(self) -> None:
        self._input: torch.Tensor | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Asked for twice in each reduction: the flat input, then the output of as many elements."""
        given, self._input = self._input, None
        if given is None:
            given = self._input = torch.empty(*size, dtype=dtype, device=device)
        return given

    def __call__(self, *_: Any, **__: Any) -> None:
        raise AssertionError("replicate scatters nothing")
