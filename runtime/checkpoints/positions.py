"""Optimizer states that are known by their position alone, as `#3`: DeepSpeed's at ZeRO stage 0 in fp32.

They are bound to names as torch's own load_state_dict does it: the first parameter of the first group is number 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from dsplan.runtime.checkpoints.names import OPTIMIZER
from dsplan.runtime.checkpoints.tensors import plain_groups
from dsplan.schemas.problem import Problem

if TYPE_CHECKING:
    from dsplan.runtime.engine import Engine

MARK = "#"


def bind_to_engine(engine: Engine, state: dict[str, Any]) -> dict[str, Any]:
    """state.json with the engine's names in place of positions."""
    here = plain_groups(engine)
    return state if here is None else bind(state, [group["params"] for group in here])


def bind(state: dict[str, Any], here: Sequence[Sequence[str]]) -> dict[str, Any]:
    """here: names by group. Problem where the groups hold other numbers of parameters. `positions`: name to position."""
    groups = state["groups"] or []
    if not any(name.startswith(MARK) for group in groups for name in group["params"]):
        return state
    there = [group["params"] for group in groups]
    if [len(names) for names in there] != [len(names) for names in here]:
        raise Problem(
            f"the optimizer's groups hold {[len(names) for names in here]} parameters, but {[len(names) for names in there]} in the "
            "checkpoint, which knows them by their order alone; build the groups as when it was saved, or load with "
            "load_optimizer_states=False"
        )
    names = {old: new for olds, news in zip(there, here, strict=True) for old, new in zip(olds, news, strict=True)}
    return {
        **state,
        "groups": [{**group, "params": list(news)} for group, news in zip(groups, here, strict=True)],
        "optimizer": {names[old]: row for old, row in state["optimizer"].items()},
        "positions": {new: old for old, new in names.items()},
    }


def by_position(tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The optimizer's tensors under the names that the files have for them."""
    positions: Mapping[str, str] = state.get("positions", {})
    named: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        name, _, kind = key.removeprefix(OPTIMIZER).rpartition(".")
        there = positions.get(name) if key.startswith(OPTIMIZER) else None
        named[key if there is None else f"{OPTIMIZER}{there}.{kind}"] = tensor
    return named


def refuse_other_shapes(engine: Engine, state: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> None:
    """shapes: of the files' tensors. Problem where a position is of another parameter."""
    masters = engine.masters()
    for name, position in state.get("positions", {}).items():
        for key, told in state["optimizer"].get(name, {}).items():
            there = shapes.get(f"{OPTIMIZER}{position}.{key}", ())
            here = tuple(masters[name].shape) or (1,)
            if not isinstance(told, list) and tuple(there) != here:
                raise Problem(
                    f"the optimizer's parameter {position} is {name} here, of shape {list(here)}, but of shape {list(there)} in the "
                    "checkpoint, which knows it by its place alone; build the groups in the order as when it was saved"
                )
