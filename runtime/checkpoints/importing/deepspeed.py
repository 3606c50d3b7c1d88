"""import_checkpoint: a folder that DeepSpeed wrote -> a folder that our engine loads."""

from __future__ import annotations

import json
from pathlib import Path

from dsplan.runtime.checkpoints import places
from dsplan.runtime.checkpoints.importing.converting import Converted, convert
from dsplan.runtime.checkpoints.importing.reading import read_tag, refuse_damaged
from dsplan.runtime.checkpoints.manifest import write_manifest, write_whole
from dsplan.runtime.checkpoints.names import STATE
from dsplan.runtime.checkpoints.whole_files import write_parts
from dsplan.schemas.checkpoint import Written
from dsplan.schemas.problem import Problem

FILE_BYTES = 5_000_000_000
"""Of one file of tensors at most, as Hugging Face cuts them by default."""


def import_checkpoint(source: Path, out: Path, *, with_optimizer: bool = True) -> Written:
    """source: the folder of one tag. Problem where it is not DeepSpeed's, is damaged, or OUT holds the tag already."""
    saved = read_tag(source)
    refuse_damaged(saved)
    converted = convert(saved, with_optimizer=with_optimizer)
    tag = source.name
    if (out / tag).exists():
        raise Problem(f"{out / tag} exists already; remove it, or name another folder")
    if out.exists() and not out.is_dir():
        raise Problem(f"{out} is a file, but must be a folder, or a new one")
    try:
        files = _write(converted, out, tag)
    except OSError as error:
        places.give_up(out, tag)
        raise Problem(f"{error.filename or out}: {error.strerror}; nothing was left in {out}") from error
    except BaseException:
        places.give_up(out, tag)
        raise
    return Written(
        source=str(source),
        path=str(out / tag),
        kind="deepspeed",
        files=tuple(files),
        num_tensors=len(converted.parts),
        tensor_bytes=sum(part.num_bytes for part in converted.parts),
        global_steps=converted.state["global_steps"],
        notes=(*converted.notes, *(f"not taken over: {line}" for line in converted.dropped)),
    )


def _write(converted: Converted, out: Path, tag: str) -> list[str]:
    aside = places.begin(out, tag)
    files = write_parts(aside, converted.parts, FILE_BYTES, {"tag": tag})
    files[STATE] = write_whole(aside / STATE, json.dumps({"tag": tag, **converted.state}, indent=1))
    write_manifest(aside, tag, files)
    places.put_in_place(out, tag, save_latest=True)
    return sorted(files)
