"""Checkpoints: tensors as safetensors by PyTorch's distributed checkpoint, and all that is no tensor in one JSON.

    FOLDER/latest                     the tag of the newest
    FOLDER/global_step12/state.json   counters, optimizer groups, schedule, loss scale, client state
    FOLDER/global_step12/*.safetensors

Folder names are DeepSpeed's, the format is not. Written aside and renamed when whole, so that a checkpoint that is there is
complete. Loads at any other number of ranks, ZeRO stage and precision, since masters are fp32 and each tensor has one name.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from dsplan.runtime.groups import note
from dsplan.runtime.sharding.state_dicts import own_use
from dsplan.schemas.problem import Problem
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from dsplan.runtime.engine import Engine

COUNTERS = ("global_steps", "micro_steps", "skipped_steps")


def save(engine: Engine, folder: Path, tag: str | None, client_state: Mapping[str, Any], save_latest: bool) -> None:
    """Every rank calls it, and writes its own shards."""
    tag = tag or f"global_step{engine.global_steps}"
    aside, whole = folder / f".partial_{tag}", folder / tag
    state = _state(engine, client_state)
    if dist.get_rank() == 0:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    dist.barrier()
    writer = _hugging_face("HuggingFaceStorageWriter", str(aside), save_distributed=True)
    state_dict_saver.save(_tensors(engine, with_optimizer=True), storage_writer=writer)
    if dist.get_rank() == 0:
        (aside / "state.json").write_text(json.dumps(state, indent=1), "utf-8")
        shutil.rmtree(whole, ignore_errors=True)
        aside.rename(whole)
        if save_latest:
            newest = folder / ".partial_latest"
            newest.write_text(tag, "utf-8")
            os.replace(newest, folder / "latest")
    dist.barrier()


def load(
    engine: Engine, folder: Path, tag: str | None, *, strict: bool, optimizer: bool, lr_scheduler: bool
) -> tuple[str | None, dict[str, Any]]:
    """(path, client state) of the checkpoint that is now in the engine; (None, {}) where there is none to load."""
    if tag is None:
        latest = folder / "latest"
        if not latest.exists():
            note(f"{latest} does not exist, so nothing was loaded")
            return None, {}
        tag = latest.read_text("utf-8").strip()
    path = folder / tag
    try:
        state = json.loads((path / "state.json").read_text("utf-8"))
    except OSError as error:
        raise Problem(f"{path}: holds no checkpoint of this engine (state.json: {error.strerror})") from error
    reader = _hugging_face("HuggingFaceStorageReader", str(path))
    if optimizer and engine.optimizer is not None:
        _make_room(engine, state)
    tensors = _tensors(engine, with_optimizer=optimizer)
    held = set(reader.read_metadata().state_dict_metadata)
    absent = [name for name in tensors if name not in held]
    if absent and strict:
        raise Problem(f"{path}: does not hold {', '.join(absent[:5])}{' and more' if len(absent) > 5 else ''}")
    engine.drop_gathered()
    state_dict_loader.load({name: tensor for name, tensor in tensors.items() if name in held}, storage_reader=reader)
    for counter in COUNTERS:
        setattr(engine, counter, state[counter])
    if optimizer and engine.optimizer is not None:
        _restore_groups(engine, state)
        if engine.scaler is not None and state["loss_scale"] is not None:
            engine.scaler.load_state_dict(state["loss_scale"])
    if lr_scheduler and engine.lr_scheduler is not None and state["lr_scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(state["lr_scheduler"])
    return str(path), state["client_state"]


def save_whole_model(engine: Engine, path: Path) -> None:
    """One file with every parameter and buffer whole, in the compute dtype: safetensors by that suffix, else torch.save."""
    engine.drop_gathered()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    with own_use():
        whole: dict[str, Any] = get_model_state_dict(engine.module, options=options)  # filled on rank 0 alone
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        low = {
            name: tensor.to(engine.compute_dtype).contiguous() if tensor.is_floating_point() else tensor
            for name, tensor in whole.items()
        }
        if path.suffix == ".safetensors":
            from safetensors.torch import save_file

            save_file({name: tensor.clone() for name, tensor in low.items()}, str(path))
        else:
            torch.save(low, path)
    dist.barrier()


def _tensors(engine: Engine, *, with_optimizer: bool) -> dict[str, torch.Tensor]:
    """Every tensor under the one name that it has in any run: DCP reads and writes them in place."""
    engine.drop_gathered()
    module = engine.module
    with own_use():
        persistent = module.state_dict().keys()
    tensors = {f"model.{name}": _storable(parameter) for name, parameter in engine.masters().items()}
    tensors |= {f"model.{name}": _storable(buffer) for name, buffer in module.named_buffers() if name in persistent}
    if with_optimizer and engine.optimizer is not None:
        for name, parameter in engine.masters().items():
            for key, value in engine.optimizer.state.get(parameter, {}).items():
                if _is_like_parameter(value):
                    tensors[f"optimizer.{name}.{key}"] = _storable(value)
    return tensors


def _is_like_parameter(value: Any) -> bool:
    """Whether an optimizer's state lies as its parameter does, and is none of its counters: those are 0-dim and plain."""
    return isinstance(value, torch.Tensor) and (value.dim() > 0 or isinstance(value, DTensor))


def _storable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a view of one dimension where it has none: the format turns such into a list of one."""
    tensor = tensor.detach()
    if tensor.dim() > 0:
        return tensor
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).reshape(1)


def _state(engine: Engine, client_state: Mapping[str, Any]) -> dict[str, Any]:
    """All that is no tensor. Problem where the client's part does not fit into JSON."""
    optimizer, schedule = engine.optimizer, engine.lr_scheduler
    state = {
        "version": 1,
        **{counter: getattr(engine, counter) for counter in COUNTERS},
        "zero_stage": engine.zero_optimization_stage(),
        "world_size": engine.world_size,
        "loss_scale": engine.scaler.state_dict() if engine.scaler is not None else None,
        "optimizer": _scalars(engine) if optimizer is not None else None,
        "groups": [_plain_group(engine, group) for group in optimizer.param_groups] if optimizer is not None else None,
        "lr_scheduler": _plain(schedule.state_dict()) if schedule is not None else None,
    }
    try:
        json.dumps(dict(client_state))
    except TypeError as error:
        raise Problem(f"client_state must fit into JSON, but it does not: {error}") from error
    return {**state, "client_state": dict(client_state)}


def _names(engine: Engine) -> dict[Any, str]:
    return {parameter: name for name, parameter in engine.masters().items()}


def _plain_group(engine: Engine, group: Mapping[str, Any]) -> dict[str, Any]:
    names = _names(engine)
    return {**_plain(group), "params": [names[parameter] for parameter in group["params"]]}


def _plain(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """What of it JSON can hold: numbers, words, lists of them."""
    kinds = (int, float, str, bool, type(None))
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in mapping.items()
        if isinstance(value, kinds) or (isinstance(value, (list, tuple)) and all(isinstance(v, kinds) for v in value))
    }


def _scalars(engine: Engine) -> dict[str, dict[str, float | None]]:
    """Per parameter, the states' names with their value; None for those that are stored as tensors."""
    assert engine.optimizer is not None
    table: dict[str, dict[str, float | None]] = {}
    for parameter, name in _names(engine).items():
        for key, value in engine.optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                if _is_like_parameter(value) and value.shape != parameter.shape:
                    raise Problem(
                        f"optimizer state {key} of {name} is not shaped like its parameter, and cannot be saved"
                    )
                table.setdefault(name, {})[key] = None if _is_like_parameter(value) else value.item()
            else:
                table.setdefault(name, {})[key] = value
    return table


@torch.no_grad()
def _make_room(engine: Engine, state: Mapping[str, Any]) -> None:
    """Give the optimizer the states that the checkpoint holds: tensors to be filled, and the numbers."""
    assert engine.optimizer is not None
    for parameter, name in _names(engine).items():
        for key, value in (state["optimizer"] or {}).get(name, {}).items():
            held = engine.optimizer.state[parameter].get(key)
            if value is None:
                if held is None:
                    engine.optimizer.state[parameter][key] = torch.zeros_like(parameter)
            elif isinstance(held, torch.Tensor):
                held.fill_(value)
            elif key == "step":
                engine.optimizer.state[parameter][key] = torch.tensor(value, dtype=torch.float32, device=engine.device)
            else:
                engine.optimizer.state[parameter][key] = value


def _restore_groups(engine: Engine, state: Mapping[str, Any]) -> None:
    """lr, betas and the like of each group. The groups themselves are the script's, and must be the same."""
    assert engine.optimizer is not None
    saved = state["groups"] or []
    mine = [_plain_group(engine, group)["params"] for group in engine.optimizer.param_groups]
    if [group["params"] for group in saved] != mine:
        raise Problem(
            "the optimizer's groups hold other parameters than those of the checkpoint; build them as when it was saved"
        )
    for group, values in zip(engine.optimizer.param_groups, saved, strict=True):
        for key, value in values.items():
            if key not in ("params", "fused", "foreach"):
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value


def _hugging_face(kind: str, *args: Any, **kwargs: Any) -> Any:
    try:
        import safetensors  # noqa: F401
    except ImportError as error:
        raise Problem(
            "checkpoints are written as safetensors, which is not installed; pip install safetensors"
        ) from error
    from torch.distributed.checkpoint import hf_storage

    return getattr(hf_storage, kind)(*args, **kwargs)
