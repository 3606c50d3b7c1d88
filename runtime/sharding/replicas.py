"""Stage 0 without copies and without standing still: modules run on their masters, gradients are averaged as backward goes.

FSDP2's `replicate` gathers over one rank, reduces in two buffers one after the other, and on the host waits for each unit.
Where masters have the compute dtype a module may run on them as they lie; one buffer carries gradients from the flat input of
the reduction to the optimizer; and what is averaged need only have arrived when backward is over. Source: torch 2.13,
torch/distributed/fsdp/_fully_shard/{_fsdp_param_group,_fsdp_collectives}.py, whose private names are what there is to ask for
it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors
from torch.distributed.fsdp._fully_shard._fsdp_common import DataParallelMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param_group import AllReduceState, FSDPParamGroup


class Replicas:
    """The gradients that are under way between the ranks."""

    def __init__(self) -> None:
        self._arriving: list[dist.Work] = []

    def run_in_place(self, units: Iterable[FSDPModule], mesh: DeviceMesh) -> None:
        """What a module computes with lies in the storage of its masters where both have one dtype; no reduction copies.

        The masters must lie on the device. A tensor that is copied into itself is left alone.
        """
        for unit in units:
            for group in unit._get_fsdp_state()._fsdp_param_groups:
                group.mesh_info = DataParallelMeshInfo(
                    mesh, replicate_mesh_dim=0
                )  # it gathers and reduces nothing itself
                group._reduce_scatter_comm = _InPlace()
                group._all_reduce_hook = functools.partial(self._average, group, mesh.get_group())
                for held in group.fsdp_params:
                    if held.param_dtype is None:
                        held.all_gather_outputs = [held._sharded_param_data]
                        held.free_unsharded_param = _keep  # type: ignore[method-assign]

    def arrive(self) -> None:
        """Wait for what is under way; after it the gradients are means."""
        while self._arriving:
            self._arriving.pop().wait()

    def _average(self, group: FSDPParamGroup, ranks: dist.ProcessGroup, flat: torch.Tensor) -> None:
        """Called between the copy of a unit's gradients into `flat` and their way to the masters."""
        before, after, _, mean = _get_gradient_divide_factors(None, ranks, flat.dtype, flat.device.type)
        if before is not None:
            flat.div_(before)
        work = dist.all_reduce(flat, op=mean, group=ranks, async_op=True)
        summed = any(held.sharded_param.grad is not None for held in group.fsdp_params)
        if summed:  # a block that runs twice: what it is added to next must have arrived too
            self.arrive()
        if summed or after is not None or flat.dtype != group._orig_dtype:  # added to, divided or cast next
            work.wait()
            if after is not None:
                flat.div_(after)
            group._all_reduce_state = AllReduceState(flat, None)  # kept until backward is over, as FSDP2 keeps its own
        else:
            self._arriving.append(work)


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
