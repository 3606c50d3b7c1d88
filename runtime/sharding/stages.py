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
from dsplan.runtime.groups import own_device
from dsplan.runtime.sharding.agreement import take_from_first_rank
from dsplan.runtime.sharding.blocks import find_blocks
from dsplan.runtime.sharding.scalars import Scalars
from dsplan.runtime.sharding.state_dicts import accept_and_give_plain
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


@dataclass(frozen=True)
class Sharded:
    """A model whose parameters FSDP2 holds, but for its scalars. units: its blocks in order, then the model itself."""

    model: nn.Module
    units: tuple[FSDPModule, ...]
    zero_stage: int
    scalars: Scalars

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

    def after_backward(self, boundary: bool) -> None:
        """What FSDP2 does not reduce itself. A second backward before the step adds to the mean of the first."""
        if boundary:
            self.scalars.reduce_gradients()

    def masters(self) -> dict[str, nn.Parameter]:
        """What the optimizer steps over, by name: fp32, and each a DTensor."""
        return {**dict(self.model.named_parameters()), **self.scalars.masters}

    def drop_gradients(self) -> None:
        """Every gradient, also those that are summed up on this rank alone and not yet reduced."""
        for unit in self.units:
            for group in unit._get_fsdp_state()._fsdp_param_groups:
                for held in group.fsdp_params:
                    held.sharded_param.grad = held.unsharded_accumulated_grad = None
                    if hasattr(held, "_unsharded_param"):
                        held._unsharded_param.grad = None
        self.scalars.drop_gradients()

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
    scalars = {name: parameter for name, parameter in model.named_parameters() if parameter.dim() == 0}
    ignored = set(scalars.values())
    units: list[FSDPModule] = []
    done: set[nn.Module] = set()
    for module in [*_separable_blocks(model), model]:
        whole = _prepare(module, mesh, device, compute_dtype, done)
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=reduce_dtype, cast_forward_inputs=module is model)
        if zero_stage == 0:
            replicate(module, mesh=mesh, mp_policy=policy, ignored_params=ignored)
        else:
            fully_shard(
                module,
                mesh=mesh,
                mp_policy=policy,
                reshard_after_forward=zero_stage == 3 and module is not model,
                ignored_params=ignored,
            )
        for parameter in whole:  # client code may hold the object still, but not its bytes
            if parameter not in ignored:
                parameter.data = parameter.data.new_empty(0)
        assert isinstance(module, FSDPModule)
        units.append(module)
    accept_and_give_plain(model, zero_stage)
    return Sharded(model, tuple(units), zero_stage, Scalars(scalars, mesh))


def _separable_blocks(model: nn.Module) -> list[nn.Module]:
    """Blocks that share no parameter with anything outside themselves, be it by itself or with the module that holds it.

    FSDP2 unties such a parameter, and refuses such a module.
    """
    blocks = [block for _, block in find_blocks(model)]
    homes: dict[nn.Parameter, set[nn.Module]] = {}

    def visit(module: nn.Module, home: nn.Module) -> None:
        if home is model and module in blocks:
            home = module
        for parameter in module.parameters(recurse=False):
            homes.setdefault(parameter, set()).add(home)
        for child in module._modules.values():  # each as often as it is held
            if child is not None:
                visit(child, home)

    visit(model, model)
    return [block for block in blocks if all(homes[parameter] == {block} for parameter in block.parameters())]


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
