"""Whole values of one parameter: master, gradient, optimizer state. DeepSpeed's debug API, `deepspeed.utils.safe_*`.

Each is collective at ZeRO stages 1 to 3, takes a parameter of the engine's module and gives plain fp32 tensors, or None where
there is none. A gradient is there after the backward that ends a step, as it was reduced: times the loss scale in fp16.
Source: deepspeed/utils/tensor_fragment.py (0.19.8).
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from dsplan.schemas.problem import Problem
from torch.distributed.tensor import DTensor, distribute_tensor

if TYPE_CHECKING:
    from dsplan.runtime.engine import Engine

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def know(engine: Engine) -> None:
    """Its parameters can be asked about from now on."""
    _engines.add(engine)


def safe_get_full_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    return _whole(_master(param)[0])


def safe_get_full_grad(param: torch.Tensor) -> torch.Tensor | None:
    return _whole(_master(param)[0].grad)


def safe_get_full_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    return _whole(_state(param, optim_state_key))


def safe_get_local_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    return _local(_master(param)[0])


def safe_get_local_grad(param: torch.Tensor) -> torch.Tensor | None:
    return _local(_master(param)[0].grad)


def safe_get_local_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    return _local(_state(param, optim_state_key))


def safe_set_full_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    master, engine = _master(param)
    _fill(master, value)
    engine.drop_gathered()


def safe_set_full_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    _fill(_master(param)[0].grad, value)


def safe_set_full_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    _fill(_state(param, optim_state_key), value)


def _master(param: torch.Tensor) -> tuple[torch.Tensor, Engine]:
    """What the optimizer steps over in this parameter's place, with its engine."""
    for engine in _engines:
        sharded = engine.sharded
        shard = sharded.behind().get(id(param), param)
        for name, master in engine.masters().items():
            if master is shard or sharded.scalars.model_holds(name, shard):
                return master, engine
    raise Problem(
        f"a tensor of shape {list(param.shape)} is no parameter of an engine's module; pass one of engine.module.parameters()"
    )


def _state(param: torch.Tensor, key: str) -> Any:
    master, engine = _master(param)
    return None if engine.optimizer is None else engine.optimizer.state.get(master, {}).get(key)


@torch.no_grad()
def _whole(tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None:
        return None
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().float().clone()


def _local(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def _fill(held: torch.Tensor | None, value: torch.Tensor) -> None:
    if held is None:
        raise Problem("there is nothing to set: the gradient or optimizer state does not exist yet")
    if held.shape != value.shape:
        raise Problem(f"the value has shape {list(value.shape)}, but must have {list(held.shape)}")
    if isinstance(held, DTensor):
        placed = value.detach().to(held.device, held.dtype)
        part = distribute_tensor(placed, held.device_mesh, list(held.placements), src_data_rank=None)
        held.to_local().copy_(part.to_local())
    else:
        held.copy_(value)
