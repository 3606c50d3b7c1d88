"""ZeRO stages as flags of one mechanism, FSDP2.

| stage | placement between events | how |
|---|---|---|
| 0 | all replicated | replicate; gradients all-reduced at the accumulation boundary |
| 1 | optimizer state sharded | gather kept and gradients unreduced until the boundary |
| 2 | and gradients | gather kept until the boundary, gradients reduce-scattered each micro-batch |
| 3 | and parameters | blocks gathered for forward and again for backward |
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from dsplan.runtime.groups import own_device
from dsplan.runtime.sharding.agreement import take_from_first_rank
from dsplan.runtime.sharding.blocks import find_blocks
from dsplan.runtime.sharding.methods import register_methods
from dsplan.runtime.sharding.offloading import policies
from dsplan.runtime.sharding.precision import Precision
from dsplan.runtime.sharding.replicas import Replicas
from dsplan.runtime.sharding.scalars import Scalars
from dsplan.runtime.sharding.sparse import SparseGradients, sparse_embeddings
from dsplan.runtime.sharding.state_dicts import accept_and_give_plain
from dsplan.schemas.offloading import Offloading
from dsplan.schemas.problem import Problem
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam


@dataclass(frozen=True, eq=False)
class Sharded:
    """A model whose parameters FSDP2 holds, but for its scalars. units: its blocks in order, then the model itself."""

    model: nn.Module
    units: tuple[FSDPModule, ...]
    zero_stage: int
    precision: Precision
    scalars: Scalars
    sparse: SparseGradients
    replicas: Replicas

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
        self.replicas.arrive()
        if boundary:
            for held in self.held():  # of units that did not run at all: FSDP2 gives zeros to the others
                master = held.sharded_param
                if master.requires_grad and master.grad is None:
                    master.grad = torch.zeros_like(master)
            self.scalars.reduce_gradients()
            self.sparse.reduce_gradients()

    def held(self) -> Iterator[FSDPParam]:
        for unit in self.units:
            for group in unit._get_fsdp_state()._fsdp_param_groups:
                yield from group.fsdp_params

    def recover(self) -> None:
        """After a backward that ended with an exception: what it had under way is lost."""
        self.replicas.arrive()
        self.root.reset_iter_state()

    def masters(self) -> dict[str, nn.Parameter]:
        """What the optimizer steps over, by name: fp32, and each a DTensor."""
        return {**dict(self.model.named_parameters()), **self.scalars.masters}

    def drop_gradients(self) -> None:
        """Every gradient, also those that are summed up on this rank alone and not yet reduced."""
        for held in self.held():
            held.sharded_param.grad = held.unsharded_accumulated_grad = None
            if hasattr(held, "_unsharded_param"):
                held._unsharded_param.grad = None
        self.scalars.drop_gradients()
        self.sparse.drop_gradients()

    def behind(self) -> dict[int, nn.Parameter]:
        """By the id of each gathered copy that the module may have given out, the parameter that it is a copy of."""
        return {
            id(held._unsharded_param): held.sharded_param for held in self.held() if hasattr(held, "_unsharded_param")
        }

    def drop_gathered(self) -> None:
        """Free every gathered copy, so that the next use sees the shards as they are then."""
        for unit in self.units:
            unit.reshard()


EXTERNAL = "_dsplan_used_elsewhere"
live: weakref.WeakSet[Sharded] = weakref.WeakSet()
"""Every model that is sharded, for those who are handed a parameter and nothing else."""


def shard(
    model: nn.Module,
    *,
    zero_stage: int,
    mesh: DeviceMesh,
    precision: Precision,
    offloading: Offloading,
) -> Sharded:
    """Hand the model's parameters to FSDP2, block by block, in place.

    Each unit first gets the masters' type and becomes equal to rank 0, so that no more than one unit is ever held whole
    beside the shards on the device.
    """
    _refuse_odd_parameters(model)
    device = own_device() if mesh.device_type == "cuda" else torch.device("cpu")
    scalars = {name: parameter for name, parameter in model.named_parameters() if parameter.dim() == 0}
    sparse = SparseGradients(sparse_embeddings(model, zero_stage), mesh, precision.compute)
    ignored = {*scalars.values(), *sparse.weights}
    kept = _named_buffers(model, precision.kept_buffers)
    units: list[FSDPModule] = []
    done: set[nn.Module] = set()
    policy = _policy(precision)
    modules = [*_separable_blocks(model), model]
    for module, place in zip(modules, policies(offloading, modules, device), strict=True):
        whole = _prepare(module, mesh, device, precision, kept, ignored, done)
        if zero_stage == 0:
            replicate(module, mesh=mesh, mp_policy=policy, offload_policy=place, ignored_params=ignored)
        else:
            fully_shard(
                module,
                mesh=mesh,
                mp_policy=policy,
                reshard_after_forward=zero_stage == 3 and module is not model,
                offload_policy=place,
                ignored_params=ignored,
            )
        for parameter in whole:  # client code may hold the object still, but not its bytes
            if parameter not in ignored:
                parameter.data = parameter.data.new_empty(0)
        assert isinstance(module, FSDPModule)
        units.append(module)
    accept_and_give_plain(model, zero_stage)
    units[-1]._get_fsdp_state()._lazy_init()
    replicas = Replicas()
    if zero_stage == 0 and offloading.what == "none":
        replicas.run_in_place(units, mesh)
    sharded = Sharded(model, tuple(units), zero_stage, precision, Scalars(scalars, mesh), sparse, replicas)
    live.add(sharded)
    register_methods(sharded.root, sharded.drop_gathered)
    return sharded


def _refuse_odd_parameters(model: nn.Module) -> None:
    """Problem where FSDP2 cannot hold a parameter."""
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            raise Problem(
                f"parameter {name} is {parameter.dtype}, which FSDP2 does not hold; keep torch.view_as_real of it and compute "
                "with torch.view_as_complex"
            )
        if parameter.numel() == 0:
            raise Problem(
                f"parameter {name} has shape {list(parameter.shape)}, so no elements, which FSDP2 does not hold; leave it out"
            )


def _policy(precision: Precision) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(
        param_dtype=None if precision.compute is torch.float32 else precision.compute,
        reduce_dtype=None if precision.reduce is precision.compute else precision.reduce,
    )


def _named_buffers(model: nn.Module, pattern: re.Pattern[str] | None) -> set[torch.Tensor]:
    return set() if pattern is None else {held for name, held in model.named_buffers() if pattern.search(name)}


def mark_external(parameter: torch.Tensor, *, used: bool = True) -> None:
    """That a module uses a parameter which another one holds: no block of its own may then gather and drop it."""
    vars(parameter)[EXTERNAL] = used


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
    return [
        block
        for block in blocks
        if all(homes[held] == {block} and not getattr(held, EXTERNAL, False) for held in block.parameters())
    ]


@torch.no_grad()
def _prepare(
    module: nn.Module,
    mesh: DeviceMesh,
    device: torch.device,
    precision: Precision,
    kept: set[torch.Tensor],
    beside: set[nn.Parameter],
    done: set[nn.Module],
) -> list[nn.Parameter]:
    """Masters in their type, but for what FSDP2 does not hold, which is fp32; buffers as they come unless the file says
    otherwise, `kept` ones in fp32. All of them rank 0's.

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
        if tensor in parameters:
            dtype = torch.float32 if tensor in beside else precision.masters
        else:
            dtype = torch.float32 if tensor in kept else precision.buffers or tensor.dtype
        if tensor.is_floating_point():
            # DeepSpeed casts the module first and makes its masters of that: they begin with the values that are computed with.
            first = precision.compute if tensor in parameters and tensor not in beside else tensor.dtype
            tensor.data = tensor.data.to(device, first).to(dtype)
        tensor.data = tensor.data.to(device).contiguous()
    take_from_first_rank(whole, mesh.get_group())
    return list(parameters)
