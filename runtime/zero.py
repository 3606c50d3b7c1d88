"""zero.Init and zero.GatheredParameters, with DeepSpeed's arguments: whole parameters before and after initialize."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from dsplan.runtime.groups import init_distributed
from dsplan.runtime.sharding.stages import live, mark_external
from dsplan.runtime.sharding.whole import Opened, Whole, sent_from
from dsplan.schemas.problem import Problem
from torch import nn
from torch.distributed.tensor import DTensor

__all__ = ["GatheredParameters", "Init", "register_external_parameter", "unregister_external_parameter"]


class Init:
    """A context for building a model. Its parameters are whole on every rank until initialize shards them.

    DeepSpeed's arguments are accepted: config_dict_or_path, remote_device, dtype and the rest have no effect.
    """

    def __init__(self, module: nn.Module | None = None, *_: Any, enabled: bool = True, **__: Any):
        self.enabled = enabled

    def __enter__(self) -> Init:
        if self.enabled:
            init_distributed()
        return self

    def __exit__(self, *_: object) -> None:
        return None


class GatheredParameters:
    """Inside, the parameters are whole and plain, in fp32 after initialize. Every rank must enter and leave together.

    modifier_rank: what this rank has made of them is what all ranks and shards hold on leaving. Without it changes of
    sharded parameters are dropped. Before initialize parameters are whole anyway, and modifier_rank sends them round.
    Source: deepspeed/runtime/zero/partition_parameters.py, GatheredParameters.
    """

    def __init__(self, params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True):
        found = params if isinstance(params, Iterable) and not isinstance(params, torch.Tensor) else [params]
        held = {id(member): member for member in found if isinstance(member, torch.Tensor)} if enabled else {}
        world = dist.get_world_size() if dist.is_initialized() else 1
        if modifier_rank is not None and not 0 <= modifier_rank < world:
            raise Problem(
                f"zero.GatheredParameters: modifier_rank is {modifier_rank}, but the ranks are 0 to {world - 1}"
            )
        self._params: list[torch.Tensor] = list(held.values())
        self._modifier_rank = modifier_rank
        self._opened: list[Opened] = []
        self._plain: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []

    def __enter__(self) -> None:
        ours = {id(sharded): sharded for sharded in live}
        for sharded in ours.values():
            sharded.drop_gathered()
        hidden = {key: parameter for sharded in ours.values() for key, parameter in sharded.behind().items()}
        scalars = {id(scalar) for sharded in ours.values() for scalar in sharded.scalars.held()}
        for member in self._params:
            parameter = hidden.get(id(member), member)
            if isinstance(parameter, Whole):
                raise Problem(
                    "zero.GatheredParameters: an outer context has gathered this parameter already; leave that first"
                )
            if isinstance(parameter, DTensor):
                self._opened.append(Opened(parameter))  # type: ignore[arg-type]
            else:
                before = parameter.detach().clone() if id(parameter) in scalars else None
                self._plain.append((parameter, parameter.data, before))

    def __exit__(self, kind: type[BaseException] | None, _: Any, __: TracebackType | None) -> None:
        keep = kind is None  # another rank may not have failed, and would wait
        for opened in self._opened:
            opened.close(self._modifier_rank, keep=keep)
        for parameter, place, before in self._plain:
            self._settle(parameter, place, before, keep=keep)
        self._opened, self._plain = [], []

    @torch.no_grad()
    def _settle(self, parameter: torch.Tensor, place: torch.Tensor, before: torch.Tensor | None, *, keep: bool) -> None:
        """A plain parameter. One that a master lies under (before is given) must stay where it is."""
        if self._modifier_rank is not None and keep and dist.is_initialized():
            parameter.data.copy_(sent_from(parameter.data, self._modifier_rank, parameter))
        elif before is not None:
            parameter.data = before
        if before is not None:
            place.copy_(parameter.data)
            parameter.data = place


def register_external_parameter(module: nn.Module, parameter: torch.Tensor) -> None:
    """Says before initialize that another module than its own uses this parameter: it is gathered with the whole model."""
    mark_external(parameter)


def unregister_external_parameter(module: nn.Module, parameter: torch.Tensor) -> None:
    mark_external(parameter, used=False)
