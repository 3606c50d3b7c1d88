"""The optimizer over the shards: made from the JSON, or the client's own object with its parameters remapped by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from dsplan.schemas import native_support
from dsplan.schemas.config import Named
from dsplan.schemas.optimizer import FUSED_ON_SHARDS
from dsplan.schemas.problem import Problem
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

BY_TORCH_NAME = {
    name.lower(): name
    for name in ("Adam", "AdamW", "SGD", "Adagrad", "RMSprop", "Adamax", "NAdam", "RAdam", "Adadelta")
}
"""What works element by element, and so on shards as on whole tensors."""


class Renaming:
    """Old parameter objects -> the shards that took their place, by name."""

    def __init__(self, model: nn.Module):
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._alive = list(model.parameters())  # so that no id is given away again
        self._new: dict[str, nn.Parameter] = {}

    def close(self, masters: dict[str, nn.Parameter]) -> None:
        """The model is sharded now: its parameters are these from now on."""
        self._new = masters

    def __call__(self, parameter: Any, where: str) -> nn.Parameter:
        name = self._names.get(id(parameter))
        if name is None:
            for held in self._new.values():
                if id(held) == id(parameter):  # a shard already
                    return held
            shape = list(parameter.shape) if isinstance(parameter, torch.Tensor) else type(parameter).__name__
            raise Problem(f"{where} holds a parameter of shape {shape} that is not in the model; pass the model's own")
        return self._new[name]

    def groups(self, given: Iterable[Any] | None) -> list[Any]:
        """model_parameters (parameters, or groups of them) with the shards in place; None: all that train."""
        if given is None:
            return [parameter for parameter in self._new.values() if parameter.requires_grad]
        renamed: list[Any] = []
        for entry in given:
            if isinstance(entry, dict):
                members = entry["params"]
                members = [members] if isinstance(members, torch.Tensor) else list(members)
                renamed.append({**entry, "params": [self(member, "model_parameters") for member in members]})
            elif isinstance(entry, tuple):  # named_parameters()
                renamed.append(self(entry[1], "model_parameters"))
            else:
                renamed.append(self(entry, "model_parameters"))
        # Frozen parameters get no state anyway, but their presence would confuse "nothing to train".
        return [entry for entry in renamed if isinstance(entry, dict) or entry.requires_grad]


def adopt(client: Optimizer, renaming: Renaming) -> Optimizer:
    """The client's optimizer object over the shards: same groups, same options, state cut as the parameters are."""
    old_state = dict(client.state)
    moved: dict[Any, nn.Parameter] = {}
    for group in client.param_groups:
        for parameter in group["params"]:
            moved[parameter] = renaming(parameter, "optimizer")
        group["params"] = [moved[parameter] for parameter in group["params"]]
    if type(client) in (torch.optim.Adam, torch.optim.AdamW) and not old_state:
        for group in client.param_groups:
            # Left to itself torch steps over DTensors one operation at a time, which takes many times as long.
            if all(
                group.get(option) in (None, False) for option in ("foreach", "fused", "capturable", "differentiable")
            ):
                group["fused"] = group["foreach"] is None
    client.state.clear()
    for parameter, state in old_state.items():
        client.state[moved[parameter]] = {
            key: value if key == "step" else _cut(value, moved[parameter]) for key, value in state.items()
        }
    return client


def _cut(value: Any, new: torch.Tensor) -> Any:
    if not isinstance(value, torch.Tensor) or not isinstance(new, DTensor) or value.shape != new.shape:
        return value
    return distribute_tensor(
        value.to(new.device, torch.float32), new.device_mesh, list(new.placements), src_data_rank=None
    )


def build_optimizer(
    named: Named | None,
    client: Optimizer | Callable[[Any], Optimizer] | None,
    model_parameters: list[Any] | None,
    renaming: Renaming,
) -> Optimizer | None:
    """The optimizer to train with; None where neither script nor JSON names one. The script's wins, as in DeepSpeed."""
    if isinstance(client, Optimizer):
        return adopt(client, renaming)
    groups = renaming.groups(model_parameters)
    if client is not None:
        return client(groups)
    if named is None:
        return None
    if not groups:
        raise Problem("no parameter of the model requires a gradient, so there is nothing to train")
    kind, options = torch_optimizer(named)
    try:
        return kind(groups, **options)
    except (TypeError, ValueError) as error:
        raise Problem(f"optimizer.params: {named.type} does not take these ({error})") from error


def torch_optimizer(named: Named) -> tuple[type[Optimizer], dict[str, Any]]:
    """The torch class and its arguments for the optimizer block. Problem for what is not carried out.

    As in DeepSpeed, Adam is AdamW unless adam_w_mode is false, and weight_decay is 0 unless given (torch_adam: torch's).
    """
    kind = named.type.lower()
    if kind not in BY_TORCH_NAME:
        raise Problem(
            f"optimizer.type {named.type} is not carried out by the native engine; use "
            f"{', '.join(BY_TORCH_NAME.values())}, or pass an optimizer object"
        )
    options = dict(named.params)
    if kind in FUSED_ON_SHARDS:  # the others run as torch does by default
        torch_adam = options.pop("torch_adam", False)
        w_mode = options.pop("adam_w_mode", True)
        options.pop("fp32_optimizer_states", None)
        options.pop("set_grad_none", None)
        if options.pop("bias_correction", True) is not True:
            raise Problem("optimizer.params.bias_correction false is not carried out by the native engine; remove it")
        kind = "adamw" if kind == "adamw" or w_mode else "adam"
        if not torch_adam:
            options.setdefault("weight_decay", 0.0)
        if "foreach" not in options:
            options["fused"] = True
    return getattr(torch.optim, BY_TORCH_NAME[kind]), _plain(options)


def wrong_options(named: Named) -> list[str]:
    """What the optimizer does not take: every unknown name, else the first wrong value. Nothing where its type is unknown."""
    try:
        kind, options = torch_optimizer(named)
    except Problem:  # the type or an option is not carried out: native_support says so
        return []
    options = {key: value for key, value in options.items() if value != "auto"}
    known = inspect.signature(kind).parameters
    unknown = [key for key in options if key not in known or key == "params"]
    unknown = [key for key in unknown if f"optimizer.params.{key}" not in native_support.KEYS]
    if unknown:
        return [f"{named.type} does not take {', '.join(unknown)}"]
    try:
        kind([nn.Parameter(torch.zeros(1))], **{key: value for key, value in options.items() if key in known})
    except (TypeError, ValueError, RuntimeError) as error:
        return [f"{named.type} does not take these ({error})"]
    return []


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
