"""What checkpoints hold, told from headers and names; and whether they are whole, told from every byte."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsplan.runtime.checkpoints import manifest
from dsplan.runtime.checkpoints.choosing import kind_of, latest_of, refuse_no_checkpoint, refuse_no_folder, tags_in
from dsplan.runtime.checkpoints.held import held_tensors
from dsplan.runtime.checkpoints.names import MODEL, STATE
from dsplan.runtime.checkpoints.places import LATEST, REMOVED, REPLACED
from dsplan.runtime.checkpoints.plain import decode
from dsplan.schemas.checkpoint import Checkpoint, Contents, Kind, Verified
from dsplan.schemas.problem import Problem

NO_CHECKSUMS = (
    "DeepSpeed writes no checksums of its own; the zip's, the pickles' form and the weights' agreement were checked"
)
NO_MODEL_CHECKSUMS = "a model alone has no checksums; its headers and lengths were checked"


def inspect(path: Path) -> Contents:
    """Problem where the path holds no checkpoint at all."""
    folder, tags = _tags(path)
    latest = latest_of(folder) if folder != path or not kind_of(path) else latest_of(path.parent)
    found = [_checkpoint(folder / tag, kind, tag == latest) for tag, kind in tags.items()]
    return Contents(
        folder=str(path),
        latest=latest,
        newest_complete=_newest([(each.tag, each.global_steps) for each in found if not each.faults], folder),
        checkpoints=tuple(sorted(found, key=lambda each: (each.global_steps is None, each.global_steps, each.tag))),
        leftovers=tuple(
            sorted(
                entry.name for entry in folder.iterdir() if entry.name.startswith((manifest.ASIDE, REPLACED, REMOVED))
            )
            if folder == path
            else ()
        ),
    )


def verify(path: Path) -> Verified:
    """Reads every byte of every checkpoint there, or of the one that is named."""
    folder, tags = _tags(path)
    found = {tag: tuple(_all_faults(folder / tag, kind)) for tag, kind in tags.items()}
    whole = [(tag, _steps(folder / tag, tags[tag])) for tag, faults in found.items() if not faults]
    latest, fault = latest_of(folder), None
    if folder == path and (folder / LATEST).is_dir():
        fault = f"{folder / LATEST}: is a folder, but must be the file that names the newest checkpoint; move it away"
    elif folder == path and latest is not None and latest not in tags:
        fault = f"{folder / LATEST}: names {latest[:60]!r}, which is no checkpoint there"
    kinds = set(tags.values())
    return Verified(
        folder=str(path),
        faults=found,
        latest_fault=fault,
        newest_complete=_newest(whole, folder),
        remarks=tuple(
            text for kind, text in (("deepspeed", NO_CHECKSUMS), ("model", NO_MODEL_CHECKSUMS)) if kind in kinds
        ),
    )


def _tags(path: Path) -> tuple[Path, dict[str, Kind]]:
    """(the folder that the tags are in, what is meant of them)."""
    refuse_no_folder(path)
    kind = kind_of(path)
    if kind is not None:
        return path.parent, {path.name: kind}
    tags = tags_in(path)
    if not tags:
        refuse_no_checkpoint(path)
    return path, tags


def _newest(whole: Sequence[tuple[str, int | None]], folder: Path) -> str | None:
    """By steps; of equal ones, and where files do not tell, by the age of the folder."""
    return max(
        whole,
        key=lambda each: (-1 if each[1] is None else each[1], (folder / each[0]).stat().st_mtime),
        default=(None, 0),
    )[0]


def _steps(path: Path, kind: Kind) -> int | None:
    return _checkpoint(path, kind, False).global_steps if kind != "model" else None


def _checkpoint(path: Path, kind: Kind, latest: bool) -> Checkpoint:
    sizes = [entry.stat().st_size for entry in path.rglob("*") if entry.is_file()]
    faults: tuple[str, ...] = ()
    told: dict[str, Any] = {"version": "unknown"}
    try:
        if kind == "native":
            faults = tuple(manifest.rough_faults(path))
            told |= _of_native(path)
        elif kind == "deepspeed":
            told |= _of_deepspeed(path)
        elif kind == "model":
            told |= {"version": "safetensors"} | _of_tensors(path, "")
    except Problem as problem:
        faults = (*faults, str(problem)) if str(problem) not in faults else faults
    told |= {"file_bytes": sum(sizes), "num_files": len(sizes)}
    return Checkpoint(tag=path.name, kind=kind, latest=latest, faults=faults, **told)


def _of_native(path: Path) -> dict[str, Any]:
    try:
        state = json.loads((path / STATE).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise Problem(f"{path / STATE}: {getattr(error, 'strerror', None) or 'is no JSON'}") from error
    if not isinstance(state, dict):
        raise Problem(f"{path / STATE}: is no JSON object")
    return _of_state(state) | {"version": f"format {state.get('version')}"} | _of_tensors(path, MODEL)


def _of_tensors(path: Path, prefix: str) -> dict[str, Any]:
    held = {name: each for name, each in held_tensors(path).items() if name.startswith(prefix)}
    return {"num_tensors": len(held), "num_parameters": sum(math.prod(each.shape) for each in held.values())}


def _of_deepspeed(path: Path) -> dict[str, Any]:
    from dsplan.runtime.checkpoints.importing.converting import convert
    from dsplan.runtime.checkpoints.importing.reading import read_tag

    saved = read_tag(path)
    converted = convert(saved)
    model = [part for part in converted.parts if part.name.startswith(MODEL)]
    told = _of_state(converted.state)
    return told | {
        "version": str(saved.model.get("ds_version", "unknown")),
        "num_tensors": len(model),
        "num_parameters": sum(math.prod(part.shape) for part in model),
    }


def _of_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """What state.json tells. What a damaged one lacks is None."""
    scale, schedule = state.get("loss_scale"), state.get("lr_scheduler")
    same = ("global_steps", "skipped_steps", "world_size", "zero_stage", "train_batch_size", "micro_batch", "precision")
    groups = [
        {**{key: decode(group[key]) for key in ("lr", "weight_decay") if key in group}, "params": len(group["params"])}
        for group in state.get("groups") or ()
    ]
    return {
        **{key: state.get(key) for key in same},
        "optimizer": tuple(sorted({key for row in (state.get("optimizer") or {}).values() for key in row})),
        "groups": tuple(groups),
        "schedule": decode(schedule) if isinstance(schedule, dict) else None,
        "loss_scale": scale["value"] if isinstance(scale, dict) else None,
        "client_state": tuple(state.get("client_state") or ()),
    }


def _all_faults(path: Path, kind: Kind) -> list[str]:
    if kind == "native":
        return manifest.faults(path)
    try:
        if kind == "model":
            held_tensors(path)
            return []
        from dsplan.runtime.checkpoints.importing.converting import convert  # needs torch
        from dsplan.runtime.checkpoints.importing.pickles import zip_fault
        from dsplan.runtime.checkpoints.importing.reading import read_tag

        if kind == "deepspeed":
            found = [fault for file in sorted(path.glob("*.pt")) if (fault := zip_fault(file)) is not None]
            if not found:
                for part in convert(read_tag(path)).parts:
                    part.make()
            return found
        read_tag(path)  # a universal one, which that refuses
    except Problem as problem:
        return [str(problem)]
    return []
