"""A checkpoint is read: found, judged as a whole before anything changes, then each rank reads its own parts of it.

At any other number of ranks, ZeRO stage and precision, since masters are fp32 and each tensor has one name. Nothing is ever
unpickled: safetensors and JSON hold no code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from dsplan.runtime.checkpoints.agreeing import attempt, refuse_with_first, together, told_by_all
from dsplan.runtime.checkpoints.comparing import compare, refuse_other_model
from dsplan.runtime.checkpoints.finding import Found, find, refuse_damaged
from dsplan.runtime.checkpoints.names import MODEL, RANDOM, STATE
from dsplan.runtime.checkpoints.places import being_read
from dsplan.runtime.checkpoints.plain import decode
from dsplan.runtime.checkpoints.positions import bind_to_engine, by_position, refuse_other_shapes
from dsplan.runtime.checkpoints.random_states import restore_random_states
from dsplan.runtime.checkpoints.reading import Tensors
from dsplan.runtime.checkpoints.saving import wait_for_pending
from dsplan.runtime.checkpoints.tensors import (
    make_room,
    model_tensors,
    optimizer_tensors,
    refuse_other_groups,
    refuse_other_optimizer,
    restore_groups,
)
from dsplan.runtime.groups import note
from dsplan.schemas.batch import fitting_ranks
from dsplan.schemas.problem import Problem

if TYPE_CHECKING:
    from dsplan.runtime.engine import Engine


@dataclass(frozen=True)
class Wishes:
    """What of a checkpoint is asked for."""

    strict: bool
    optimizer: bool
    lr_scheduler: bool
    module_only: bool


def load(engine: Engine, folder: Path, tag: str | None, wishes: Wishes) -> tuple[str | None, dict[str, Any] | None]:
    """(path, client state) of the checkpoint that is now in the engine; (None, None), as DeepSpeed's, where there is none.

    Every rank calls it. Problem on every rank, before anything is changed, where it is damaged or of another model.
    """
    wait_for_pending(engine)
    found = _found_by_first(folder, tag)
    if found is None:
        return None, None
    path = Path(found.path)
    with being_read(path):
        if not found.native:
            together(lambda: _load_model_alone(engine, path, wishes.strict))
            return found.path, {}
        together(lambda: _see(path))
        refuse_damaged(found)
        state = together(lambda: bind_to_engine(engine, _read_state(path)) if wishes.optimizer else _read_state(path))
        there = together(lambda: Tensors(path))
        together(lambda: _judge(engine, path, there, state, wishes))
        if not wishes.module_only:
            together(lambda: _settle_batch(engine, state))
        together(lambda: _read_tensors(engine, there, state, wishes))
    if not wishes.module_only:
        _restore_rest(engine, state, wishes)
    return found.path, {key: decode(value) for key, value in state["client_state"].items()}


def _found_by_first(folder: Path, tag: str | None) -> Found | None:
    """Rank 0 looks, and all take its word: what they see might differ while another job writes there."""
    looked, line, _ = attempt(lambda: find(folder, tag) if dist.get_rank() == 0 else None)
    refuse_with_first(line)
    found = looked[0] if looked is not None else None
    held = json.loads(told_by_all(json.dumps(None if found is None else asdict(found)))[0] or "null")
    return None if held is None else Found(**held)


def _see(path: Path) -> None:
    if not path.is_dir():
        raise Problem(
            f"{path} is not there, though rank 0 sees it; load_dir must be on a file system that all ranks share"
        )


def _read_state(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((path / STATE).read_text("utf-8"))
    if state.get("version") != 1:
        raise Problem(f"{path / STATE}: is of version {state.get('version')}, but this release reads version 1")
    return state


def _judge(engine: Engine, path: Path, there: Tensors, state: Mapping[str, Any], wishes: Wishes) -> None:
    """Problem where the checkpoint is of another model or other groups."""
    held = {name.removeprefix(MODEL): shape for name, shape in there.shapes.items() if name.startswith(MODEL)}
    here = {name.removeprefix(MODEL): tuple(tensor.shape) for name, tensor in model_tensors(engine).items()}
    frozen = {name for name, parameter in engine.masters().items() if not parameter.requires_grad}
    left_out = frozen & set(state["left_out"])
    found = compare({name: shape for name, shape in here.items() if name not in left_out}, held)
    refuse_other_model(str(path), found, strict=wishes.strict)
    if wishes.optimizer and engine.optimizer is not None and state["groups"] is not None:
        refuse_other_optimizer(engine, state.get("optimizer_class"), state["groups"])
        refuse_other_groups(engine, state["groups"], state["optimizer"] or {})
        refuse_other_shapes(engine, state, there.shapes)
    if wishes.lr_scheduler:
        _judge_schedule(engine, path, state["lr_scheduler"])
    for what, names in (
        ("absent there, so left as here", found.absent),
        ("not in this model, so not used", found.surplus),
        ("frozen and saved without, so left as here", tuple(sorted(left_out))),
    ):
        if names:
            note(f"{path}: {what}: {', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}")


def _judge_schedule(engine: Engine, path: Path, saved: Mapping[str, Any] | None) -> None:
    """Problem where it is the state of another kind of schedule; a note where one of the two has none."""
    schedule: Any = engine.lr_scheduler
    if schedule is None or not hasattr(schedule, "state_dict"):
        if saved is not None:
            note(f"{path}: holds a schedule's state, but this run has no schedule that takes it, so it is not used")
        return
    name = type(schedule).__name__
    if saved is None:
        note(f"{path}: holds no schedule's state, so {name} begins anew")
        return
    # What begins with _ differs between releases of torch.
    absent = sorted(key for key in schedule.state_dict() if not key.startswith("_") and key not in saved)
    if absent:
        raise Problem(
            f"{path}: its schedule's state has no {absent[0]}, so it is of another schedule than {name} here; build it as when it "
            "was saved, or load with load_lr_scheduler_states=False"
        )


def _read_tensors(engine: Engine, there: Tensors, state: Mapping[str, Any], wishes: Wishes) -> None:
    """In place, each rank its own parts."""
    engine.drop_gathered()
    tensors = model_tensors(engine)
    if wishes.optimizer and engine.optimizer is not None:
        make_room(engine, state["optimizer"] or {})
        tensors |= optimizer_tensors(engine)
    mine = f"{RANDOM}{dist.get_rank()}"
    if not wishes.module_only and mine in there.shapes:
        tensors[mine] = torch.zeros(there.shapes[mine], dtype=torch.uint8)
    there.read_into(by_position(tensors, state))
    if mine in tensors:
        restore_random_states(tensors[mine], engine.device)


def _restore_rest(engine: Engine, state: Mapping[str, Any], wishes: Wishes) -> None:
    """All that is no tensor."""
    if wishes.optimizer and engine.optimizer is not None and state["groups"] is not None:
        restore_groups(engine, state["groups"])
        if engine.scaler is not None and state["loss_scale"] is not None:
            engine.scaler.load_state_dict(state["loss_scale"])
    if wishes.lr_scheduler and engine.lr_scheduler is not None and state["lr_scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(decode(state["lr_scheduler"]))
    engine.restore_counters(state)
    if engine.training_dataloader is not None and state["data"] is not None:
        engine.training_dataloader.resume(state["data"])
    if engine.world_size > state["world_size"]:
        note(
            f"the checkpoint holds the random number generators of {state['world_size']} of {engine.world_size} ranks: those "
            f"of the ranks from {state['world_size']} on stay as the script has seeded them"
        )


def _settle_batch(engine: Engine, state: Mapping[str, Any]) -> None:
    """On another number of ranks train_batch_size and the micro-batch stay and the accumulation follows from them, unless the
    config names a train_batch_size or a micro-batch of its own. Problem that names the numbers of ranks that would do."""
    saved, micro_batch = int(state["train_batch_size"]), engine.train_micro_batch_size_per_gpu()
    of_its_own = isinstance(engine.config.get("train_batch_size"), int) or micro_batch != state["micro_batch"]
    if engine.world_size != state["world_size"] and engine.train_batch_size() != saved and not of_its_own:
        if saved % (micro_batch * engine.world_size):
            raise Problem(
                f"the checkpoint was trained with train_batch_size {saved}, which {engine.world_size} ranks of micro-batch "
                f"{micro_batch} do not divide; start {fitting_ranks(saved, micro_batch)}, choose another micro-batch, or name "
                "another train_batch_size in the config"
            )
        engine.set_train_batch_size(saved)
        note(
            f"train_batch_size stays {saved}: accumulation is {engine.gradient_accumulation_steps()} on {engine.world_size} "
            "ranks"
        )
    for name, here in (("train_batch_size", engine.train_batch_size()), ("micro_batch", micro_batch)):
        if here != state[name]:
            note(f"{name} is {here}, and was {state[name]} when the checkpoint was saved")


def _load_model_alone(engine: Engine, path: Path, strict: bool) -> None:
    """A consolidated model: names without a prefix, any float dtype, tied parameters under one of their names."""
    engine.drop_gathered()
    there = Tensors(path)
    tensors = _under_names_there(engine, set(there.shapes))
    # Our views of scalars have one dimension; a whole model's have none.
    here = {name: tensor if there.shapes.get(name) != () else tensor.reshape(()) for name, tensor in tensors.items()}
    found = compare({name: tuple(tensor.shape) for name, tensor in here.items()}, there.shapes)
    tied = _aliases(engine)
    surplus = tuple(name for name in found.surplus if name not in tied)
    refuse_other_model(str(path), replace(found, surplus=surplus), strict=strict)
    there.read_into(here)
    note(f"{path} holds a model alone: optimizer, schedule and counters stay as they are")


def _under_names_there(engine: Engine, held: set[str]) -> dict[str, torch.Tensor]:
    """The model's tensors, each under that of its names which the file has."""
    others: dict[str, list[str]] = {}
    for alias, name in _aliases(engine).items():
        others.setdefault(name, []).append(alias)
    named = {}
    for key, tensor in model_tensors(engine).items():
        name = key.removeprefix(MODEL)
        named[next((known for known in [name, *others.get(name, [])] if known in held), name)] = tensor
    return named


def _aliases(engine: Engine) -> dict[str, str]:
    """The further names of shared parameters -> the name that masters() has."""
    first: dict[int, str] = {}
    found = {}
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        if known != name:
            found[name] = known
    return found
