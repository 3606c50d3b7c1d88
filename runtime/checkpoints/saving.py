"""Checkpoints are written: tensors as safetensors by every rank, and all that is no tensor in one JSON.

    FOLDER/latest                       the tag of the newest
    FOLDER/global_step12/state.json     counters, optimizer groups, schedule, loss scale, client state
    FOLDER/global_step12/*.safetensors  what each rank wrote
    FOLDER/global_step12/manifest.json  lengths and checksums of these

Folder names are DeepSpeed's, the format is not. Written aside and renamed when whole, so that a checkpoint that is there is
complete. Loads at any other number of ranks, ZeRO stage and precision, since masters are fp32 and each tensor has one name.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from dsplan.runtime.checkpoints import places
from dsplan.runtime.checkpoints.agreeing import attempt, refuse_with_first, together, told_by_all
from dsplan.runtime.checkpoints.background import Background
from dsplan.runtime.checkpoints.manifest import ASIDE, File, complete_tags, write_manifest, write_whole
from dsplan.runtime.checkpoints.names import RANDOM, STATE
from dsplan.runtime.checkpoints.random_states import random_states
from dsplan.runtime.checkpoints.state import state_text
from dsplan.runtime.checkpoints.tensors import optimizer_tensors, written_tensors
from dsplan.runtime.checkpoints.writing import Piece, file_name, on_host, own_pieces, write_pieces
from dsplan.runtime.groups import note
from dsplan.runtime.sharding.consolidating import consolidated
from dsplan.schemas.problem import Problem

if TYPE_CHECKING:
    from dsplan.runtime.engine import Engine


@dataclass(frozen=True)
class Order:
    """One checkpoint to be written. key: its own among all that this job writes."""

    folder: Path
    tag: str
    key: str
    save_latest: bool
    keep_last: int | None
    state: str
    """The text of state.json."""

    @property
    def place(self) -> Path:
        return self.folder / self.tag


def save(
    engine: Engine,
    folder: Path,
    tag: str | None,
    client_state: Mapping[str, Any],
    save_latest: bool,
    exclude_frozen: bool = False,
) -> None:
    """Every rank calls it, and writes its own shards. Problem on every rank where one could not."""
    wait_for_pending(engine)
    wanted = engine.checkpoint_options
    named = f"global_step{engine.global_steps}" if tag is None else tag
    folder, tag, key = _agreed_names(
        engine, folder.absolute(), named
    )  # the script may change its folder while it is written
    engine.drop_gathered()
    if engine.unfinished_micro_batches():
        note(
            f"saved within a step, after {engine.unfinished_micro_batches()} of its {engine.gradient_accumulation_steps()} "
            "micro-batches: a run that resumes from it begins that step anew"
        )
    left_out = frozenset(
        name for name, parameter in engine.masters().items() if exclude_frozen and not parameter.requires_grad
    )
    text = together(lambda: state_text(engine, tag, client_state, latest=save_latest, left_out=left_out))
    order = Order(folder, tag, key, save_latest, wanted.keep_last, text)
    together(lambda: places.begin(folder, tag) if dist.get_rank() == 0 else None)
    together(lambda: _see(places.aside_of(folder, tag)))
    tensors = {**written_tensors(engine, left_out), **optimizer_tensors(engine)}
    tensors[f"{RANDOM}{dist.get_rank()}"] = random_states(engine.device)
    pieces = own_pieces(tensors)
    if wanted.background:
        copies, rank = on_host(pieces), dist.get_rank()
        engine.pending_save = Background(
            tag, key, lambda: _write(order, copies, rank), lambda parts: _complete(order, parts)
        )
        return
    part, line = _write(order, pieces, dist.get_rank())
    parts = [(told[0], told[1]) for told in map(json.loads, filter(None, told_by_all(json.dumps([part, line]))))]
    refuse_with_first(_complete(order, parts) if dist.get_rank() == 0 else None)


def wait_for_pending(engine: Engine) -> None:
    """The checkpoint that is being written in the background is there. Problem on every rank where it could not be."""
    pending, engine.pending_save = engine.pending_save, None
    if pending is not None:
        failure = pending.wait()
        refuse_with_first(failure if dist.get_rank() == 0 else None)


def _agreed_names(engine: Engine, folder: Path, tag: str) -> tuple[Path, str, str]:
    """The folder, the tag and a key that are the same on all ranks: those of rank 0. Problem where they may not differ."""
    told = [json.loads(text or "[]") for text in told_by_all(json.dumps([str(folder), tag, secrets.token_hex(8)]))]
    for rank, (other, its_tag, _) in enumerate(told):
        if other != told[0][0]:
            raise Problem(
                f"save_dir differs: it is {other} on rank {rank} and {told[0][0]} on rank 0; every rank must give the same "
                "folder, on a file system that all share"
            )
        if its_tag != told[0][1] and engine.checkpoint_options.tag_validation != "ignore":
            text = f"the checkpoint's tag differs: it is {its_tag} on rank {rank} and {told[0][1]} on rank 0"
            if engine.checkpoint_options.tag_validation == "fail":
                raise Problem(f"{text}; give one tag on every rank (checkpoint.tag_validation is Fail)")
            note(f"{text}; {told[0][1]} is taken (checkpoint.tag_validation)")
            break
    agreed = str(told[0][1])
    if not places.is_tag(agreed):
        raise Problem(
            f"{agreed[:40]!r}{'...' if len(agreed) > 40 else ''} cannot be a checkpoint's tag: it must be the name of one folder, "
            "shorter than 200 bytes, not begin with a dot, and not be latest"
        )
    return Path(told[0][0]), agreed, f"dsplan/save/{told[0][2]}"


def _see(aside: Path) -> None:
    if not aside.is_dir():
        raise Problem(
            f"{aside} is not there, though rank 0 made it; save_dir must be on a file system that all ranks share"
        )


def _write(order: Order, pieces: list[Piece], rank: int) -> tuple[str, str | None]:
    """This rank's file: (its entry of the manifest as JSON, None), or ("", why there is none)."""
    path = places.aside_of(order.folder, order.tag) / file_name(rank)
    done, line, _ = attempt(lambda: write_pieces(path, pieces, order.tag) if pieces else None)
    if done is None:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        return "", line if str(path) in (line or "") else f"{path.name}: {line}"
    return json.dumps({} if done[0] is None else {path.name: asdict(done[0])}), None


def _complete(order: Order, parts: list[tuple[str, str | None]]) -> str | None:
    """On rank 0, when all have written: the checkpoint gets its name. A line where it cannot; then nothing of it is left."""
    failed = [(rank, line) for rank, (_, line) in enumerate(parts) if line is not None]
    line = None if not failed else f"rank {failed[0][0]}: {failed[0][1]}" if len(parts) > 1 else failed[0][1]
    if line is None:
        _, line, _ = attempt(lambda: _put_in_place(order, [part for part, _ in parts]))
    if line is None:
        return None
    places.give_up(order.folder, order.tag)
    left = complete_tags(order.folder)
    rest = f"; the newest complete checkpoint is {order.folder / left[0]}" if left else "; there is no earlier one"
    return f"checkpoint {order.place} was not saved: {line}{rest}"


def _put_in_place(order: Order, parts: list[str]) -> None:
    aside = places.aside_of(order.folder, order.tag)
    files = {name: File(**entry) for part in parts for name, entry in json.loads(part).items()}
    files[STATE] = write_whole(aside / STATE, order.state)
    write_manifest(aside, order.tag, files)
    places.put_in_place(order.folder, order.tag, save_latest=order.save_latest)
    if order.keep_last is not None:
        places.remove_older(order.folder, order.keep_last)


def save_whole_model(engine: Engine, path: Path, *, exclude_frozen: bool = False) -> None:
    """One file with every parameter and buffer whole, in the compute dtype: safetensors by that suffix, else torch.save."""
    low = consolidated(engine.sharded, engine.compute_dtype, exclude_frozen=exclude_frozen)
    together(lambda: _write_model(path, low) if low is not None else None)


def _write_model(path: Path, low: Mapping[str, torch.Tensor]) -> None:
    """Aside first, so that the earlier one stays where it cannot be written. Problem then."""
    aside = path.with_name(f"{ASIDE}{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".safetensors":
            from safetensors.torch import save_file

            save_file({name: tensor.clone() for name, tensor in low.items()}, str(aside))
        else:
            with open(aside, "wb") as file:  # torch names no reason where it opens it
                torch.save(low, file)
        os.replace(aside, path)
    except Exception as error:  # torch and safetensors have errors of their own for a full disk
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise Problem(
            f"{path}: the model was not saved: {(getattr(error, 'strerror', None) or str(error)).splitlines()[0]}"
        ) from error
