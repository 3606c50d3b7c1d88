"""A checkpoint of any number of ranks -> the model alone, whole, as plain PyTorch and Hugging Face load it.

On any machine, without the model's code, and tensor by tensor: no more than one is held.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from dsplan.runtime.checkpoints.choosing import Chosen
from dsplan.runtime.checkpoints.held import held_tensors
from dsplan.runtime.checkpoints.importing.converting import convert
from dsplan.runtime.checkpoints.importing.reading import read_tag, refuse_damaged
from dsplan.runtime.checkpoints.manifest import ASIDE, faults
from dsplan.runtime.checkpoints.names import MODEL, STATE
from dsplan.runtime.checkpoints.safetensors_file import Part
from dsplan.runtime.checkpoints.whole_files import dtype_of, read_held, write_parts
from dsplan.schemas.checkpoint import Precision, Written
from dsplan.schemas.problem import Problem

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def consolidate(chosen: Chosen, out: Path, precision: Precision, most_bytes: int) -> Written:
    """Every parameter and buffer once, under the first of its names. most_bytes: of one file.

    Problem where the checkpoint is damaged, or OUT is there already; nothing is left there then.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise Problem(f"{out} exists already; remove it, or name another folder")
    beyond: list[str] = []
    parts = [_in_precision(part, DTYPES[precision], beyond) for part in whole_model(chosen)]
    if not parts:
        raise Problem(f"{chosen.path} holds no tensor of a model")
    parent = out.absolute().parent
    aside = parent / f"{ASIDE}{out.absolute().name}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        files = write_parts(aside, parts, most_bytes, {})
        if out.exists():
            out.rmdir()  # empty
        os.rename(aside, out)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise Problem(f"{error.filename or out}: {error.strerror or error}; nothing was left of {out}") from error
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    notes = [f"{name} holds numbers beyond {precision}'s largest, which are infinite now" for name in beyond]
    return Written(
        source=str(chosen.path),
        path=str(out),
        kind=chosen.kind,
        files=tuple(files),
        num_tensors=len(parts),
        tensor_bytes=sum(part.num_bytes for part in parts),
        precision=precision,
        notes=tuple(notes),
    )


def whole_model(chosen: Chosen) -> Iterator[Part]:
    """The model's tensors as they were saved, fp32 masters, by their plain names. Problem where one is damaged or absent."""
    path = chosen.path
    if chosen.kind in ("deepspeed", "universal"):  # the latter is refused by what reads it
        saved = read_tag(path)
        refuse_damaged(saved)
        converted = convert(saved, with_optimizer=False)
        scalars, parts = set(converted.state["scalars"]), list(converted.parts)
    else:
        if chosen.kind == "native":
            found = faults(path)
            if found:
                raise Problem(found[0] + (f" (and {len(found) - 1} more)" if len(found) > 1 else ""))
        held = held_tensors(path)
        scalars = (
            set(json.loads((path / STATE).read_text("utf-8")).get("scalars", ())) if chosen.kind == "native" else set()
        )
        parts = [
            Part(name, dtype_of(each), each.shape, functools.partial(read_held, each)) for name, each in held.items()
        ]
    for part in parts:
        if chosen.kind == "model":
            yield part
        elif part.name.startswith(MODEL):
            name = part.name.removeprefix(MODEL)
            yield _without_dims(replace(part, name=name)) if name in scalars else replace(part, name=name)


def _without_dims(part: Part) -> Part:
    return replace(part, shape=(), make=lambda: part.make().reshape(()))


def _in_precision(part: Part, dtype: torch.dtype, beyond: list[str]) -> Part:
    """Floating numbers in another dtype, all else as it is. Names of tensors that become infinite are put into `beyond`."""
    if not part.dtype.is_floating_point or part.dtype == dtype:
        return part

    def make() -> torch.Tensor:
        whole = part.make()
        changed = whole.to(dtype)
        if bool((changed.isinf() & ~whole.isinf()).any()):
            beyond.append(part.name)
        return changed

    return replace(part, dtype=dtype, make=make)
