"""state_dict and load_state_dict of a sharded module: plain whole tensors go in at every ZeRO stage, and come out below 3."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from dsplan.runtime.groups import note
from dsplan.runtime.sharding.agreement import refuse_apart
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

_silent = False


def accept_and_give_plain(model: nn.Module, zero_stage: int) -> None:
    """Hook into every module of the model, so that parts of it can be saved and loaded by themselves too."""
    for module in model.modules():
        module.register_load_state_dict_pre_hook(_cut_to_shards)  # type: ignore[no-untyped-call]
        if zero_stage in (1, 2):
            module.register_state_dict_pre_hook(functools.partial(_come_together, zero_stage))  # type: ignore[no-untyped-call]
        if zero_stage < 3:
            module.register_state_dict_post_hook(_give_whole)  # type: ignore[no-untyped-call]
    if zero_stage == 3:
        told: list[bool] = []
        model.register_state_dict_post_hook(functools.partial(_tell_of_shards, zero_stage, told))  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def own_use() -> Iterator[None]:
    """The engine itself asks for a state_dict, and knows what shards are."""
    global _silent
    before, _silent = _silent, True
    try:
        yield
    finally:
        _silent = before


def _cut_to_shards(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Each rank holds the whole tensor that it is given, and cuts its own part of it: no rank waits for another."""
    for name, parameter in module._parameters.items():
        value = state.get(prefix + name)
        if (
            isinstance(parameter, DTensor)
            and isinstance(value, torch.Tensor)
            and not isinstance(value, DTensor)
            and value.shape == parameter.shape
        ):
            state[prefix + name] = distribute_tensor(
                value.detach().to(parameter.device, parameter.dtype),
                parameter.device_mesh,
                list(parameter.placements),
                src_data_rank=None,
            )


def _come_together(zero_stage: int, module: nn.Module, prefix: str, _: bool) -> None:
    """Whole parameters are gathered from every rank, and so every rank must ask for them."""
    if not _silent and prefix == "":
        refuse_apart("saves or loads", zero_stage)
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


@torch.no_grad()
def _give_whole(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name in module._parameters:
        value = state.get(prefix + name)
        if isinstance(value, DTensor):
            if not _silent:
                state[prefix + name] = value.full_tensor()
            elif not any(placement.is_shard() for placement in value.placements):
                state[prefix + name] = value.to_local()


def _tell_of_shards(zero_stage: int, told: list[bool], *_: Any) -> None:
    if not _silent and not told:
        told.append(True)
        note(
            f"state_dict() at ZeRO stage {zero_stage} holds this rank's shards alone; save_checkpoint and save_16bit_model "
            "write the whole model"
        )
