"""What a folder given to load_checkpoint holds, and whether it is whole."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from dsplan.runtime.checkpoints import places
from dsplan.runtime.checkpoints.agreeing import told_by_all
from dsplan.runtime.checkpoints.choosing import is_deepspeed, is_whole_model
from dsplan.runtime.checkpoints.manifest import (
    NAME,
    checksum_fault,
    complete_tags,
    faults,
    read_manifest,
    rough_faults,
)
from dsplan.runtime.checkpoints.names import STATE
from dsplan.runtime.groups import note
from dsplan.schemas.problem import Problem


@dataclass(frozen=True)
class Found:
    """folder: of the checkpoints; path: what is to be loaded. native: one of ours, else a model in safetensors alone."""

    folder: str
    path: str
    native: bool


def find(folder: Path, tag: str | None) -> Found | None:
    """None where there is nothing at all. Problem where there is something else, or it is damaged."""
    if not folder.exists():
        if tag is not None:
            raise Problem(f"{folder} does not exist")
        note(f"{folder} does not exist, so nothing was loaded")
        return None
    if not folder.is_dir():
        raise Problem(f"{folder} is a file, but load_dir must be a folder that holds checkpoints")
    with contextlib.suppress(OSError):
        places.put_back(folder)
    if tag is None:
        if is_whole_model(folder) and not _holds_checkpoints(folder):
            return Found(str(folder), str(folder), native=False)
        tag = _newest(folder)
        if tag is None:
            return None
    path = folder / tag
    if is_deepspeed(path):
        raise Problem(
            f"{path} is DeepSpeed's own checkpoint, which holds pickles; convert it by `dsplan checkpoint import {folder} -o "
            "OUT` and load OUT"
        )
    if (path / NAME).exists() or (path / STATE).exists():
        return Found(str(folder), str(path), native=True)
    if is_whole_model(path):
        return Found(str(folder), str(path), native=False)
    what = "does not exist" if not path.exists() else "is empty" if not any(path.iterdir()) else f"has no {NAME}"
    raise Problem(f"{path}: {what}, so it is no checkpoint{offer(folder, tag)}")


def _newest(folder: Path) -> str | None:
    """The tag that `latest` names; where a save was killed between naming its checkpoint and `latest`, that one."""
    decided = places.decided_latest(folder)
    if decided is not None:
        return decided
    latest = folder / places.LATEST
    try:
        tag = latest.read_bytes().decode("utf-8", "replace").strip()
    except FileNotFoundError:
        _refuse_lost_latest(folder)
        return None
    except OSError as error:
        raise Problem(f"{latest}: {error.strerror}{offer(folder, None)}") from error
    if not places.is_tag(tag):
        raise Problem(f"{latest}: holds {tag[:40]!r}, which is the name of no checkpoint{offer(folder, None)}")
    if not (folder / tag).is_dir():
        raise Problem(f"{latest}: names {tag}, which is not in {folder}{offer(folder, tag)}")
    return tag


def _refuse_lost_latest(folder: Path) -> None:
    held = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and _is_any(Path(entry.path)))
    if any('"latest": true' in _beginning(folder / tag / STATE) or is_deepspeed(folder / tag) for tag in held):
        raise Problem(f"{folder / places.LATEST}: is absent, but there are checkpoints{offer(folder, None)}")
    rest = f"; {', '.join(held[:5])} can be loaded by tag" if held else ""
    note(f"{folder / places.LATEST} does not exist, so nothing was loaded{rest}")


def _is_any(path: Path) -> bool:
    return not path.name.startswith(".") and ((path / STATE).exists() or (path / NAME).exists() or is_deepspeed(path))


def _holds_checkpoints(folder: Path) -> bool:
    """HF Trainer saves its model beside them, in the same folder."""
    return (folder / places.LATEST).exists() or any(
        _is_any(Path(entry.path)) for entry in os.scandir(folder) if entry.is_dir()
    )


def _beginning(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(500).decode("utf-8", "replace")
    except OSError:
        return ""


def refuse_damaged(found: Found) -> None:
    """Every rank reads its share of the files. Problem on every rank that names the file. Collective."""
    path = Path(found.path)
    fault: str | None = None
    rough = rough_faults(path)
    if rough:
        fault = rough[0] + (f" (and {len(rough) - 1} more)" if len(rough) > 1 else "")
    else:
        manifest = read_manifest(path)
        by_size = sorted(manifest.files, key=lambda name: (-manifest.files[name].bytes, name))
        for name in by_size[dist.get_rank() :: dist.get_world_size()]:
            fault = fault or checksum_fault(path, manifest, name)
    lines = [line for line in told_by_all(fault) if line is not None]
    if lines:
        offers = told_by_all(offer(Path(found.folder), path.name) if dist.get_rank() == 0 else None)
        raise Problem(f"{lines[0]}, so {path.name} is not loaded{offers[0] or ''}")


def offer(folder: Path, damaged: str | None) -> str:
    """What to load instead: the newest checkpoint that is whole to its last byte."""
    for tag in complete_tags(folder):
        if tag != damaged and not faults(folder / tag):
            return f'; the newest other complete checkpoint is {folder / tag}: load_checkpoint("{folder}", tag="{tag}")'
    return f"; there is no other complete checkpoint in {folder}"
