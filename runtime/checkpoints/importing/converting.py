"""What DeepSpeed saved, as our state.json and tensors.

Taken over: fp32 masters, buffers, frozen parameters, the optimizer's states and groups, counters, schedule, loss scale and
client_state. What has no place with us is named in `dropped`, never left out silently.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from dsplan.runtime.checkpoints.importing.flat import Place, put_together
from dsplan.runtime.checkpoints.importing.naming import same_values
from dsplan.runtime.checkpoints.importing.pickles import DynamicScale, Inert
from dsplan.runtime.checkpoints.importing.reading import Saved, Trained, as_laid_out, own_tensors, trained
from dsplan.runtime.checkpoints.names import MODEL, OPTIMIZER
from dsplan.runtime.checkpoints.places import OWN_TAGS
from dsplan.runtime.checkpoints.plain import encode
from dsplan.runtime.checkpoints.safetensors_file import Part
from dsplan.schemas.problem import Problem

OWN_KEYS = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps",
    "global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions",
    "universal_checkpoint_info", "ds_config", "ds_version",
}  # fmt: skip
"""Of a model file; all else is the script's client_state. Source: deepspeed/runtime/engine.py, _common_checkpoint_state."""


@dataclass(frozen=True)
class Converted:
    """state: all of state.json but the tag; dropped: a line for each thing that is not taken over; notes: what looks odd."""

    parts: tuple[Part, ...]
    state: dict[str, Any]
    dropped: tuple[str, ...]
    notes: tuple[str, ...]


def convert(saved: Saved, *, with_optimizer: bool = True) -> Converted:
    """Problem that names what cannot be told. Tensors are made when they are asked for."""
    with as_laid_out(saved.files.folder):
        found = _convert(saved, with_optimizer)
        return replace(found, parts=tuple(_held_to(saved, part) for part in found.parts))


def _held_to(saved: Saved, part: Part) -> Part:
    """Made, it must have the shape and dtype that was told."""

    def make() -> torch.Tensor:
        with as_laid_out(saved.files.folder):
            tensor = part.make()
            if (tensor.dtype, tuple(tensor.shape)) != (part.dtype, part.shape):
                raise ValueError(f"{part.name} is {tensor.dtype} {list(tensor.shape)}")
            return tensor

    return replace(part, make=make)


def _convert(saved: Saved, with_optimizer: bool) -> Converted:
    held = trained(saved)
    notes = _unlike_counters(saved, held)
    dropped: list[str] = []
    weights = list(_weights(saved, held))
    parts = [Part(f"{MODEL}{name}", dtype, shape or (1,), make) for name, dtype, shape, make in weights]
    numbers: dict[str, dict[str, Any]] = {}
    groups = None
    if held is not None and with_optimizer:
        states, numbers = _states(saved, held)
        parts += states
        groups = _groups(held)
    elif held is not None:
        dropped.append("the optimizer's state: not asked for")
    names = {name for name, *_ in weights}
    left_out = sorted(name for name in _frozen_names(saved) if name not in names)
    return Converted(
        tuple(parts),
        {
            "version": 1,
            "latest": True,
            **_counters(saved),
            "zero_stage": saved.zero_stage,
            "world_size": int(saved.model.get("dp_world_size") or 1),
            "precision": _precision(saved),
            "left_out": left_out,
            "scalars": sorted(name for name, _, shape, _ in weights if shape == ()),
            "loss_scale": _loss_scale(saved),
            "optimizer": numbers if groups is not None else None,
            "groups": groups,
            "lr_scheduler": _schedule(saved, dropped),
            "data": None,
            "client_state": _client_state(saved, dropped),
            "imported": {"engine": "deepspeed", "version": str(saved.model.get("ds_version", "unknown"))},
        },
        tuple(dropped),
        notes,
    )


def _unlike_counters(saved: Saved, held: Trained | None) -> tuple[str, ...]:
    """A line where the model's file counts other steps than its folder's name or the optimizer. Problem where it counts fewer
    than the optimizer has made, but at stage 0, whose bf16 optimizer makes an empty step when it is built."""
    folder, model = saved.files.folder, saved.model
    steps, skipped = int(model["global_steps"]), int(model["skipped_steps"])
    notes = []
    if OWN_TAGS.fullmatch(folder.name) and folder.name != f"global_step{steps}":
        notes.append(f"{folder}: its files count {steps} steps, which is not what its name says")
    counted = [states[0]["step"] for states in held.states if "step" in states[0]] if held is not None else []
    made = max((float(step) for step in counted), default=float(steps - skipped))
    text = f"{saved.files.model[0]}: counts {steps} steps, {skipped} of them skipped, but the optimizer's files {made:g} steps"
    if saved.zero_stage > 0 and made > steps - skipped:
        raise Problem(f"{text}; files of two checkpoints are mixed")
    if saved.zero_stage > 0 and made < steps - skipped:
        notes.append(f"{text}; unless its state was left out once, files of two checkpoints are mixed")
    return tuple(notes)


Weight = tuple[str, torch.dtype, tuple[int, ...], Callable[[], torch.Tensor]]


def _weights(saved: Saved, held: Trained | None) -> Iterator[Weight]:
    """Every parameter and buffer under its first name: parameters fp32, buffers as they are."""
    own = dict(own_tensors(saved.model)) if saved.zero_stage < 3 else {}
    told: set[str] = set()
    if held is not None and held.masters is not None:
        for place in held.places:
            told.add(place.name)
            make = functools.partial(_master, saved, place, held.masters[place.array], own.get(place.name))
            yield place.name, torch.float32, place.shape, make
    for name, tensor in own.items():
        if name not in told:
            yield _whole(name, tensor, parameter=True)
    if saved.zero_stage == 3:
        yield from _frozen_in_parts(saved)
    for name in saved.model.get("buffer_names") or ():
        yield _whole(name, saved.model["module"][name], parameter=False)


def _whole(name: str, tensor: torch.Tensor, *, parameter: bool) -> Weight:
    dtype = torch.float32 if parameter and tensor.is_floating_point() else tensor.dtype
    shape = tuple(tensor.shape)
    return name, dtype, shape, lambda: tensor.detach().to(dtype).reshape(shape or (1,))


def _master(saved: Saved, place: Place, arrays: Sequence[torch.Tensor], low: torch.Tensor | None) -> torch.Tensor:
    master = put_together(place, arrays).float()
    if low is not None and not same_values(low, master):
        raise Problem(
            f"{saved.files.optimizer[0].parent}: {place.name} in {saved.files.model[0].name} is not the fp32 weight of the optimizer's "
            "files in its precision; files of two checkpoints are mixed"
        )
    return master.reshape(place.shape or (1,))


def _frozen_in_parts(saved: Saved) -> Iterator[Weight]:
    """At stage 3 each rank has its part of a frozen parameter, the last one padded."""
    for name, shape in (saved.model.get("frozen_param_shapes") or {}).items():
        pieces = []
        for path, model in zip(saved.files.model, (saved.model, *saved.others), strict=True):
            fragments = model.get("frozen_param_fragments") or {}
            if name not in fragments:
                raise Problem(f"{path}: has no part of the frozen parameter {name}")
            pieces.append(fragments[name])
        size, numbers = tuple(shape), math.prod(shape)
        if sum(piece.numel() for piece in pieces) < numbers:
            raise Problem(f"{saved.files.folder}: the ranks' parts of the frozen parameter {name} are not all of it")
        dtype = torch.float32 if pieces[0].is_floating_point() else pieces[0].dtype
        yield name, dtype, size, functools.partial(_joined, pieces, numbers, size, dtype)


def _joined(pieces: Sequence[torch.Tensor], numbers: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.cat([piece.detach().flatten() for piece in pieces])[:numbers].to(dtype).reshape(shape or (1,))


def _frozen_names(saved: Saved) -> list[str]:
    return list(saved.model.get("frozen_param_shapes") or {})


def _states(saved: Saved, held: Trained) -> tuple[list[Part], dict[str, dict[str, Any]]]:
    """Tensors that lie as the parameters do, and the table of numbers that our loader reads."""
    parts: list[Part] = []
    table: dict[str, dict[str, Any]] = {}
    for place in held.places:
        ranks = held.states[place.array]
        for key, value in ranks[0].items():
            row = table.setdefault(place.name, {})
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                arrays = [states[key] for states in ranks]
                dtype = value.dtype
                row[key] = None if dtype is torch.float32 else str(dtype).removeprefix("torch.")
                make = functools.partial(_state, place, arrays)
                parts.append(Part(f"{OPTIMIZER}{place.name}.{key}", dtype, place.shape or (1,), make))
            elif not (value is None or isinstance(value, (int, float, torch.Tensor))):
                raise Problem(f"{saved.files.folder}: optimizer state {key} of {place.name} is no number and no tensor")
            else:
                # torch's optimizers count steps in a tensor, DeepSpeed's own in a number.
                step = torch.tensor(float(value)) if key == "step" and isinstance(value, (int, float)) else value
                row[key] = [encode(step, f"{saved.files.folder}: optimizer state {key} of {place.name}", tensors=True)]
    return parts, table


def _state(place: Place, arrays: Sequence[torch.Tensor]) -> torch.Tensor:
    return put_together(place, arrays).reshape(place.shape or (1,))


def _groups(held: Trained) -> list[dict[str, Any]]:
    groups = []
    for index, group in enumerate(held.groups):
        members = [place.name for place in held.places if held.group_of[place.array] == index]
        told = {
            key: encode(value, f"the optimizer's group {index}, {key}", tensors=True)
            for key, value in group.items()
            if key not in ("params", "param_names", "step")  # the step is each parameter's own
        }
        groups.append({**told, "params": members})
    return groups


def _counters(saved: Saved) -> dict[str, Any]:
    config, ranks = saved.config, int(saved.model.get("dp_world_size") or 1)
    micro, accumulation = config.get("train_micro_batch_size_per_gpu"), config.get("gradient_accumulation_steps")
    total = config.get("train_batch_size")
    given = [value if isinstance(value, int) and value > 0 else None for value in (micro, accumulation, total)]
    micro, accumulation, total = given
    if micro is None:
        micro = total // (ranks * (accumulation or 1)) if total is not None else 1
    if accumulation is None:
        accumulation = total // (micro * ranks) if total is not None else 1
    steps = int(saved.model["global_steps"])
    return {
        "global_steps": steps,
        "micro_steps": steps * accumulation,
        "skipped_steps": int(saved.model["skipped_steps"]),
        "global_samples": int(saved.model.get("global_samples", steps * micro * accumulation * ranks)),
        "train_batch_size": micro * accumulation * ranks,
        "micro_batch": micro,
        "accumulation": accumulation,
    }


def _precision(saved: Saved) -> str:
    blocks = [(name, saved.config.get(name)) for name in ("fp16", "bf16")]
    return next((name for name, block in blocks if isinstance(block, Mapping) and block.get("enabled") is True), "fp32")


def _loss_scale(saved: Saved) -> dict[str, float] | None:
    """As our LossScale keeps it; None where the training is not in fp16."""
    if _precision(saved) != "fp16":
        return None
    fp16 = saved.config["fp16"]
    state: Any = saved.optimizer[0] if saved.optimizer else saved.model.get("optimizer")
    if not isinstance(state, Mapping):
        return None
    scaler = state.get("loss_scaler")
    if isinstance(scaler, DynamicScale):
        kept = vars(scaler)
        names = ("cur_scale", "cur_hysteresis", "cur_iter", "last_overflow_iter")
        values = [kept[name] for name in names]
    elif isinstance(scaler, Inert):
        values = [vars(scaler)["cur_scale"], 1, 0, -1]
    else:  # stage 0, which knows no hysteresis
        values = [
            state["cur_scale"],
            fp16.get("hysteresis", 2),
            state.get("cur_iter", 0),
            state.get("last_overflow_iter", -1),
        ]
    return dict(zip(("value", "hysteresis_left", "step", "last_overflow_step"), values, strict=True))


def _schedule(saved: Saved, dropped: list[str]) -> dict[str, Any] | None:
    held = saved.model.get("lr_scheduler")
    if not isinstance(held, Mapping):
        return None
    return _tellable(held, "lr_scheduler", dropped, tensors=True)


def _client_state(saved: Saved, dropped: list[str]) -> dict[str, Any]:
    for key in ("data_sampler", "random_ltd"):
        if saved.model.get(key) is not None:
            dropped.append(f"{key}: the native engine has none")
    return _tellable({key: value for key, value in saved.model.items() if key not in OWN_KEYS}, "client_state", dropped)


def _tellable(values: Mapping[Any, Any], what: str, dropped: list[str], *, tensors: bool = False) -> dict[str, Any]:
    """What JSON can hold of it; a line in `dropped` for each of the others."""
    told = {}
    for key, value in values.items():
        try:
            if not isinstance(key, str):
                raise Problem(f"{what}[{key!r}] has a key that is no word")
            told[key] = encode(value, f"{what}[{key!r}]", tensors=tensors)
        except Problem as problem:
            dropped.append(str(problem).partition(";")[0])
    return told
