"""Which checkpoint a path on the command line means, and of which kind it is. Reads alone: nothing is put back or removed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from dsplan.runtime.checkpoints import manifest
from dsplan.runtime.checkpoints.names import STATE
from dsplan.runtime.checkpoints.places import LATEST
from dsplan.schemas.checkpoint import Kind
from dsplan.schemas.problem import Problem


@dataclass(frozen=True)
class Chosen:
    """path: of one tag, or of a model alone."""

    path: Path
    kind: Kind


def kind_of(path: Path) -> Kind | None:
    """None where a folder is no checkpoint itself."""
    if (path / manifest.NAME).exists() or (path / STATE).exists():
        return "native"
    if (path / "zero").is_dir():
        return "universal"
    if is_deepspeed(path) or any(path.glob("*_states.pt")):
        return "deepspeed"
    return "model" if is_whole_model(path) else None


def is_deepspeed(path: Path) -> bool:
    """Files that 0.19.8 writes. Source: deepspeed/runtime/engine.py, _get_ckpt_name and _get_rank_zero_ckpt_name."""
    return any(path.glob("mp_rank_*_model_states.pt")) or any(path.glob("*zero_pp_rank_*_states.pt"))


def is_whole_model(path: Path) -> bool:
    """A model alone, as `dsplan checkpoint consolidate` and Hugging Face write it."""
    own = (path / manifest.NAME).exists() or (path / STATE).exists()
    return not own and any(path.glob("*.safetensors"))


def tags_in(folder: Path) -> dict[str, Kind]:
    """The checkpoints in a folder, by name; what is aside is none."""
    found: dict[str, Kind] = {}
    for path in sorted(folder.iterdir(), key=_by_number):
        if path.is_dir() and not path.name.startswith("."):
            kind = kind_of(path)
            if kind is not None:
                found[path.name] = kind
    return found


def _by_number(path: Path) -> list[tuple[int, str]]:
    """global_step9 before global_step10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path.name)]


def latest_of(folder: Path) -> str | None:
    """The tag that `latest` holds, whether or not it is there."""
    try:
        return (folder / LATEST).read_bytes().decode("utf-8", "replace").strip()
    except OSError:
        return None


def choose(path: Path) -> Chosen:
    """The checkpoint that is meant: the path itself, or the one that `latest` names there."""
    refuse_no_folder(path)
    kind = kind_of(path)
    if kind is not None:
        return Chosen(path, kind)
    tags, latest = tags_in(path), latest_of(path)
    if not tags:
        refuse_no_checkpoint(path)
    names = ", ".join(str(path / tag) for tag in list(tags)[:5])
    if latest is None:
        raise Problem(f"{path / LATEST} is absent, so name one of {names}")
    if latest not in tags:
        raise Problem(f"{path / LATEST} names {latest[:60]!r}, which is no checkpoint there; name one of {names}")
    return Chosen(path / latest, tags[latest])


def refuse_no_checkpoint(path: Path) -> NoReturn:
    text = f"{path} holds no checkpoint: neither dsplan's, nor DeepSpeed's, nor a model in safetensors"
    left = sorted(entry.name for entry in path.glob(f"{manifest.ASIDE}*") if entry.is_dir())
    raise Problem(text + (f"; {left[0]} was left by a save that was cut off, or is being written" if left else ""))


def refuse_no_folder(path: Path) -> None:
    if not path.exists():
        raise Problem(f"{path} does not exist")
    if not path.is_dir():
        raise Problem(f"{path} is a file, but must be a folder of checkpoints, or one of them")
