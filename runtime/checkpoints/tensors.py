"""Every tensor of an engine under the one name that it has in any run, and every number of its optimizer."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from dsplan.runtime.checkpoints.names import MODEL, OPTIMIZER
from dsplan.runtime.checkpoints.plain import decode, encode
from dsplan.runtime.sharding.state_dicts import own_use
from dsplan.schemas.problem import Problem
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from dsplan.runtime.engine import Engine


def model_tensors(engine: Engine) -> dict[str, torch.Tensor]:
    """Masters and persistent buffers, which are read and written in place."""
    with own_use():
        persistent = engine.module.state_dict().keys()
    named = {name: buffer for name, buffer in engine.module.named_buffers() if name in persistent}
    return {f"{MODEL}{name}": storable(tensor) for name, tensor in {**engine.masters(), **named}.items()}


def written_tensors(engine: Engine, left_out: frozenset[str]) -> dict[str, torch.Tensor]:
    """What this rank has to offer for a checkpoint. Buffers are those of rank 0, which has them from the beginning."""
    masters = engine.masters()
    kept = {
        name: tensor
        for name, tensor in model_tensors(engine).items()
        if name.removeprefix(MODEL) in masters or dist.get_rank() == 0
    }
    return {name: tensor for name, tensor in kept.items() if name.removeprefix(MODEL) not in left_out}


def optimizer_tensors(engine: Engine) -> dict[str, torch.Tensor]:
    """The states that lie as their parameters do."""
    found = {}
    for name, states in optimizer_states(engine).items():
        for key, value in states.items():
            if is_like_parameter(value):
                found[f"{OPTIMIZER}{name}.{key}"] = storable(value)
    return found


def optimizer_states(engine: Engine) -> dict[str, dict[str, Any]]:
    """By parameter's name; none where there is no optimizer."""
    if engine.optimizer is None:
        return {}
    held = {name: engine.optimizer.state.get(parameter, {}) for name, parameter in engine.masters().items()}
    return {name: states for name, states in held.items() if states}


def is_like_parameter(value: Any) -> bool:
    """Whether an optimizer's state lies as its parameter does, and is none of its counters: those are 0-dim and plain."""
    return isinstance(value, torch.Tensor) and (value.dim() > 0 or isinstance(value, DTensor))


def storable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a view of one dimension where it has none: the format turns such into a list of one."""
    tensor = tensor.detach()
    if tensor.dim() > 0:
        return tensor
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).reshape(1)


def optimizer_numbers(engine: Engine) -> dict[str, dict[str, Any]]:
    """Per parameter, the states' names: null for what is stored as a tensor of the parameter's dtype, the dtype for what is
    one of another, [number] for a number."""
    masters = engine.masters()
    table: dict[str, dict[str, Any]] = {}
    for name, states in optimizer_states(engine).items():
        row = table.setdefault(name, {})
        for key, value in states.items():
            if not is_like_parameter(value):
                row[key] = [encode(value, f"optimizer state {key} of {name}", tensors=True)]
            elif value.shape != masters[name].shape:
                raise Problem(
                    f"optimizer state {key} of {name} has shape {list(value.shape)}, not its parameter's "
                    f"{list(masters[name].shape)}, and cannot be saved"
                )
            else:
                same = value.dtype == masters[name].dtype
                row[key] = None if same else str(value.dtype).removeprefix("torch.")
    return table


@torch.no_grad()
def make_room(engine: Engine, numbers: Mapping[str, Mapping[str, Any]]) -> None:
    """Give the optimizer the states that the checkpoint holds: tensors to be filled, and the numbers."""
    if engine.optimizer is None:
        return
    options = {id(parameter): group for group in engine.optimizer.param_groups for parameter in group["params"]}
    for name, parameter in engine.masters().items():
        if id(parameter) not in options:
            continue
        on_device = options[id(parameter)].get("fused") or options[id(parameter)].get("capturable")
        for key, told in numbers.get(name, {}).items():
            held = engine.optimizer.state[parameter].get(key)
            if isinstance(told, list):
                value = decode(told[0])
                if isinstance(held, torch.Tensor):
                    held.copy_(value)
                else:
                    # Where torch's own load_state_dict leaves a step. Source: Optimizer._process_value_according_to_param_policy.
                    move = isinstance(value, torch.Tensor) and (key != "step" or on_device)
                    engine.optimizer.state[parameter][key] = value.to(parameter.device) if move else value
            elif held is None:
                dtype = parameter.dtype if told is None else getattr(torch, told)
                engine.optimizer.state[parameter][key] = torch.zeros_like(parameter, dtype=dtype)


def plain_groups(engine: Engine) -> list[dict[str, Any]] | None:
    """The optimizer's groups with the names of their parameters."""
    if engine.optimizer is None:
        return None
    names = {id(parameter): name for name, parameter in engine.masters().items()}
    return [
        {
            **{
                key: encode(value, f"the optimizer's group {index}, {key}", tensors=True)
                for key, value in group.items()
                if key != "params"
            },
            "params": [names[id(parameter)] for parameter in group["params"]],
        }
        for index, group in enumerate(engine.optimizer.param_groups)
    ]


def refuse_other_optimizer(engine: Engine, saved_class: str | None, saved: list[dict[str, Any]]) -> None:
    """Problem where another optimizer wrote the states. saved_class: None where DeepSpeed did, and nobody knows.

    Two classes that take the same hyperparameters, as Adam and AdamW do, read each other's.
    """
    here = type(engine.optimizer).__name__
    if saved_class is None or saved_class == here or not saved or engine.optimizer is None:
        return
    by_schedule = {"initial_lr"}  # torch's schedules put it there
    if set(saved[0]) - by_schedule != set(engine.optimizer.param_groups[0]) - by_schedule:
        raise Problem(
            f"the checkpoint's optimizer is {saved_class}, but {here} here; build it as when it was saved, or load with "
            "load_optimizer_states=False"
        )


def refuse_other_groups(engine: Engine, saved: list[dict[str, Any]], trained: Container[str]) -> None:
    """The groups themselves are the script's, and must be the same. trained: what has optimizer states in the checkpoint.

    But for what is frozen here and has no states there: DeepSpeed's stages 1 to 3 leave such out of their groups. Source:
    deepspeed/runtime/zero/stage_1_and_2.py and stage3.py, trainable_parameters.
    """
    mine = [group["params"] for group in plain_groups(engine) or []]
    idle = {name for name, held in engine.masters().items() if not held.requires_grad and name not in trained}
    if len(mine) != len(saved):
        raise Problem(
            f"the optimizer's groups of parameters: {len(mine)} here, {len(saved)} in the checkpoint; build them as when it was "
            "saved, or load with load_optimizer_states=False"
        )
    for index, (here, group) in enumerate(zip(mine, saved, strict=True)):
        differing = (set(here) ^ set(group["params"])) - idle
        if differing:
            name = min(differing)
            raise Problem(
                f"the optimizer's group {index} holds other parameters than in the checkpoint: {name} is "
                f"{'only here' if name in here else 'only there'}; build the groups as when it was saved, or load with "
                "load_optimizer_states=False"
            )


def restore_groups(engine: Engine, saved: list[dict[str, Any]]) -> None:
    """lr, betas and the like of each group; how the kernels run is this run's affair."""
    assert engine.optimizer is not None
    for group, values in zip(engine.optimizer.param_groups, saved, strict=True):
        for key, told in values.items():
            if key in ("params", "fused", "foreach", "capturable"):
                continue
            value = decode(told)
            if isinstance(group.get(key), torch.Tensor) and isinstance(value, torch.Tensor):
                group[key].copy_(value)
            else:
                group[key] = value
