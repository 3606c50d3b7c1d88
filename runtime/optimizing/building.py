"""The optimizer over the shards: made from the JSON, or the client's own object with its parameters remapped by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from dsplan.runtime.optimizing.muon import Muon, MuonOnShards, is_muons
from dsplan.runtime.optimizing.naming import Recipe, recipe
from dsplan.schemas.config import Named
from dsplan.schemas.problem import Problem
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer


class Renaming:
    """Old parameter objects -> what took their place, by name: the shards, or their masters on the host."""

    def __init__(self, model: nn.Module):
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._alive = list(model.parameters())  # so that no id is given away again
        self._new: dict[str, nn.Parameter] = {}

    def close(self, masters: dict[str, nn.Parameter], model: nn.Module) -> None:
        """The model is sharded now: what trains are these masters, whichever of the parameters somebody holds."""
        self._new = masters
        self._alive += model.parameters()
        self._names |= {id(parameter): name for name, parameter in model.named_parameters()}
        self._names |= {id(master): name for name, master in masters.items()}

    def name_of(self, parameter: nn.Parameter) -> str:
        return self._names[id(parameter)]

    def __call__(self, parameter: Any, where: str) -> nn.Parameter:
        name = self._names.get(id(parameter))
        if name is None:
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
    _refuse_low_bits(client)
    old_state = dict(client.state)
    moved: dict[Any, nn.Parameter] = {}
    for group in client.param_groups:
        for parameter in group["params"]:
            moved[parameter] = renaming(parameter, "optimizer")
        group["params"] = [moved[parameter] for parameter in group["params"]]
    if type(client) is torch.optim.Muon:
        client.__class__ = MuonOnShards
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


def _refuse_low_bits(client: Optimizer) -> None:
    """Problem for what steps over no DTensor, and whose scales are of blocks of one rank's tensor, which no other can load.

    Source: bitsandbytes/optim/optimizer.py, init_state (0.50.2): absmax of each 256 elements beside the states.
    """
    kind = type(client)
    library = kind.__module__.partition(".")[0]
    if library == "bitsandbytes" or (library == "torchao" and kind.__name__.endswith(("8bit", "4bit", "Fp8"))):
        raise Problem(
            f"optimizer {library}.{kind.__name__} steps over plain tensors alone, not over shards; use "
            "AdamW with bf16.bf16_optimizer_states and bf16.bf16_master_weights_and_grads for states of 2 bytes, or --engine "
            "deepspeed"
        )


def _cut(value: Any, new: torch.Tensor) -> Any:
    if not isinstance(value, torch.Tensor) or not isinstance(new, DTensor) or value.shape != new.shape:
        return value
    cut = distribute_tensor(value.to(torch.float32), new.device_mesh, list(new.placements), src_data_rank=None)
    return cut.to(new.device)  # which is the host's where the shards are there


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
        return adopt(client(groups), renaming)
    if named is None:
        return None
    if not groups:
        raise Problem("no parameter of the model requires a gradient, so there is nothing to train")
    made = recipe(named)
    try:
        optimizer = _muon(made, groups, renaming) if made.kind is Muon else made.kind(groups, **made.options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise Problem(f"optimizer.params: {named.type} does not take these ({error})") from error
    # As in DeepSpeed: a schedule's lists count the groups that hold something.
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
    return optimizer


def _muon(made: Recipe, given: list[Any], renaming: Renaming) -> Optimizer:
    """Each group in two halves, by the parameters' names and dims; a group's own options go before the JSON's.

    Source: deepspeed/runtime/engine.py, _muon_param_groups (0.19.8).
    """
    groups = [entry for entry in given if isinstance(entry, dict)]
    loose = [entry for entry in given if not isinstance(entry, dict)]
    groups += [{"params": loose}] if loose else []
    options = dict(made.options)
    adam_w_mode = options.pop("adam_w_mode", True)
    rates = {"muon": options.pop("muon_lr", options.get("lr")), "adam": options.pop("adam_lr", options.get("lr"))}
    keys = {"muon": ("lr", "momentum", "weight_decay", "ns_method"), "adam": ("lr", "betas", "eps", "weight_decay")}
    halves: list[dict[str, Any]] = []
    for index, group in enumerate(groups):
        own = {key: value for key, value in group.items() if key != "params"}
        prefix = own.get("name") or (f"group{index}" if len(groups) > 1 else None)
        for label in ("muon", "adam"):
            half = [
                member
                for member in group["params"]
                if member.requires_grad and is_muons(renaming.name_of(member), member) is (label == "muon")
            ]
            settings = {
                key: value for key, value in {**options, "lr": rates[label], **own}.items() if key in keys[label]
            }
            if settings.get("lr", 0) is None:
                del settings["lr"]
            name = f"{prefix}-{label}-params" if prefix else f"{label}-params"
            halves += [{"params": half, "use_muon": label == "muon", "name": name, **settings}] if half else []
    return Muon(halves, adam_w_mode=adam_w_mode)
