"""ZeRO stages as flags of one mechanism, FSDP2.

| stage | placement between events | how |
|---|---|---|
| 0 | all replicated | replicate; gradients all-reduced at the accumulation boundary |
| 1 | optimizer state sharded | gather kept and gradients unreduced until the boundary |
| 2 | and gradients | gather kept until the boundary, gradients reduce-scattered each micro-batch |
| 3 | and parameters | blocks gathered for forward and again for backward |
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from dsplan.runtime.agreement import take_from_first_rank
from dsplan.runtime.blocks import find_blocks
from dsplan.runtime.groups import own_device
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


@dataclass(frozen=True)
class Sharded:
    """A model whose parameters FSDP2 holds. units: its blocks in order, then the model itself."""

    model: nn.Module
    units: tuple[FSDPModule, ...]
    zero_stage: int

    @property
    def root(self) -> FSDPModule:
        return self.units[-1]

    def before_backward(self, boundary: bool) -> None:
        """Say whether the coming backward ends the accumulation: what is summed now, and what stays gathered."""
        if self.zero_stage < 2:
            self.root.set_requires_gradient_sync(boundary)
        # At stage 3 the blocks are dropped each time; the root is in use over the whole micro-batch, so that keeping
        # it from one to the next costs nothing at the peak and saves its gather.
        self.root.set_reshard_after_backward(boundary, recurse=self.zero_stage < 3)

    def drop_gathered(self) -> None:
        """Free every gathered copy, so that the next use sees the shards as they are then."""
        for unit in self.units:
            unit.reshard()


def shard(
    model: nn.Module,
    *,
    zero_stage: int,
    mesh: DeviceMesh,
    compute_dtype: torch.dtype,
    reduce_dtype: torch.dtype | None,
) -> Sharded:
    """Hand the model's parameters to FSDP2, block by block, in place.

    Each unit first becomes fp32 (the masters) and equal to rank 0, so that no more than one unit is ever held whole
    beside the shards on the device.
    """
    device = own_device() if mesh.device_type == "cuda" else torch.device("cpu")
    low = None if compute_dtype is torch.float32 else compute_dtype
    units: list[FSDPModule] = []
    done: set[nn.Module] = set()
    for module in [*_separable_blocks(model), model]:
        whole = _prepare(module, mesh, device, compute_dtype, done)
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=reduce_dtype, cast_forward_inputs=module is model)
        if zero_stage == 0:
            replicate(module, mesh=mesh, mp_policy=policy)
        else:
            fully_shard(
                module, mesh=mesh, mp_policy=policy, reshard_after_forward=zero_stage == 3 and module is not model
            )
        for parameter in whole:  # client code may hold the object still, but not its bytes
            parameter.data = parameter.data.new_empty(0)
        assert isinstance(module, FSDPModule)
        units.append(module)
    return Sharded(model, tuple(units), zero_stage)


def _separable_blocks(model: nn.Module) -> list[nn.Module]:
    """Blocks that share no parameter with anything outside themselves: FSDP2 would untie such a parameter."""
    homes: dict[nn.Parameter, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            homes[parameter] = homes.get(parameter, 0) + 1
    found = []
    for _, block in find_blocks(model):
        inside: dict[nn.Parameter, int] = {}
        for module in block.modules():
            for parameter in module.parameters(recurse=False):
                inside[parameter] = inside.get(parameter, 0) + 1
        if inside and all(homes[parameter] == count for parameter, count in inside.items()):
            found.append(block)
    return found


@torch.no_grad()
def _prepare(
    module: nn.Module, mesh: DeviceMesh, device: torch.device, compute_dtype: torch.dtype, done: set[nn.Module]
) -> list[nn.Parameter]:
    """Masters in fp32, float buffers in the compute dtype (as DeepSpeed casts the whole module), both rank 0's.

    Gives the parameters of the modules that are not done yet, and takes these into `done`.
    """
    parameters: dict[nn.Parameter, None] = {}
    buffers: dict[torch.Tensor, None] = {}
    for owner in module.modules():
        if owner in done:
            continue
        done.add(owner)
        parameters |= dict.fromkeys(held for held in owner._parameters.values() if held is not None)
        buffers |= dict.fromkeys(held for held in owner._buffers.values() if held is not None)
    whole: list[torch.Tensor] = [*parameters, *buffers]
    for tensor in whole:
        dtype = torch.float32 if tensor in parameters else compute_dtype
        wanted = dtype if tensor.is_floating_point() else tensor.dtype
        tensor.data = tensor.data.to(device=device, dtype=wanted).contiguous()
    take_from_first_rank(whole, mesh.get_group())
    return list(parameters)
