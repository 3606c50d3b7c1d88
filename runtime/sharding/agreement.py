"""All ranks train one model: they must hold the same tensors by name, and begin with the values of rank 0."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

import torch
import torch.distributed as dist
from dsplan.runtime.groups import carries_data, group_limit
from dsplan.schemas.problem import Problem
from torch import nn


def refuse_unequal_models(model: nn.Module) -> None:
    """Problem on every rank where names, shapes or dtypes of parameters or buffers differ from rank 0's."""
    if dist.get_world_size() == 1 or not carries_data():
        return
    mine = _description(model)
    digest = hashlib.sha256(json.dumps(mine).encode()).hexdigest()
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, digest)
    if len(set(digests)) == 1:
        return
    descriptions: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(descriptions, mine)
    first = descriptions[0]
    for rank, other in enumerate(descriptions):
        for name in dict.fromkeys([*first, *other]):
            if first.get(name) != other.get(name):
                raise Problem(
                    f"rank {rank} holds another model than rank 0: {name} is {other.get(name, 'absent')} there and "
                    f"{first.get(name, 'absent')} on rank 0; build the same model on every rank"
                )


def _description(model: nn.Module) -> dict[str, str]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return {
        name: f"{'frozen ' if name in frozen else ''}{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        for name, tensor in tensors
    }


@torch.no_grad()
def take_from_first_rank(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Overwrite each tensor in place with that of the group's first rank."""
    if dist.get_world_size(group) == 1:
        return
    source = dist.get_global_rank(group, 0)
    for tensor in tensors:
        dist.broadcast(tensor.detach(), src=source, group=group)


_small_talk: tuple[Any, dist.ProcessGroup] | None = None


def _host_group() -> dist.ProcessGroup:
    """A group of all ranks for single numbers between hosts: gloo, so that no device has to wait. Made on first use."""
    global _small_talk
    if _small_talk is None or _small_talk[0] is not dist.group.WORLD:
        _small_talk = (dist.group.WORLD, dist.new_group(backend="gloo", timeout=group_limit()))
    return _small_talk[1]


def open_host_group() -> None:
    """Now, while all ranks are together; later one may come alone."""
    if dist.get_world_size() > 1 and carries_data():
        _host_group()


def values_of_ranks(value: float) -> list[float]:
    """Every rank's value, by rank, over the host. Collective."""
    if dist.get_world_size() == 1 or not carries_data():
        return [value]
    heard = [torch.zeros(1, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(heard, torch.tensor([value], dtype=torch.float64), group=_host_group())
    return [float(number) for number in heard]


DOINGS = ("trains", "evaluates", "saves or loads")
Doing = Literal["trains", "evaluates", "saves or loads"]


def refuse_apart(doing: Doing, zero_stage: int, step: int | None = None) -> None:
    """Problem on every rank where another does something else: their gathers would take each other's parameters."""
    doings = [DOINGS[int(number)] for number in values_of_ranks(DOINGS.index(doing))]
    for rank, other in enumerate(doings):
        if other != doings[0]:
            when = "" if step is None else f", at step {step}"
            raise Problem(
                f"rank 0 {doings[0]} while rank {rank} {other}{when}; at zero stage {zero_stage} parameters are gathered from all "
                "ranks, so that each must do the same: give every rank as many batches, and evaluate, save, load and ask for "
                "state_dict on every rank"
            )
