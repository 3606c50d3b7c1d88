"""Which files DeepSpeed's checkpoint is made of, by name, and which of its kinds are not read.

Source of the names: deepspeed/runtime/engine.py (0.19.8), _get_ckpt_name, _get_rank_zero_ckpt_name, _get_optimizer_ckpt_name,
_get_expert_ckpt_name; deepspeed/runtime/pipe/module.py, ckpt_layer_path; deepspeed/checkpoint/ds_to_universal.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from dsplan.schemas.problem import Problem

_MODEL = re.compile(r"mp_rank_(?P<tp>\d+)_model_states\.pt")
_MODEL_PARTITION = re.compile(r"zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<tp>\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?P<kind>bf16_|fp16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<tp>\d+)_optim_states\.pt")
_OTHER_KINDS = (
    (
        re.compile(r"(layer_\d+_)?expert_\d+_mp_rank_.*\.pt|expp_rank_\d+_.*\.pt"),
        "holds a mixture of experts, spread over ranks",
    ),
    (re.compile(r"layer_\d+-.*\.pt"), "was written by a pipeline, one file for each layer"),
)


@dataclass(frozen=True)
class Files:
    """Of one tag. model: one file, or one for each rank at ZeRO stage 3; optimizer: by rank, none at stage 0."""

    folder: Path
    model: tuple[Path, ...]
    optimizer: tuple[Path, ...]


def files_of(folder: Path) -> Files:
    """Problem that names the file where it is a kind that is not read, or the rank whose file is absent."""
    names = sorted(path.name for path in folder.iterdir())
    if (folder / "zero").is_dir():
        raise Problem(
            f"{folder} is a universal checkpoint (it has a folder `zero`); give the checkpoint that ds_to_universal made it from"
        )
    for name in names:
        for form, what in _OTHER_KINDS:
            if form.fullmatch(name):
                raise Problem(f"{folder / name}: this checkpoint {what}, which is not imported")
    whole, model, optimizer = _by_rank(names, _MODEL), _by_rank(names, _MODEL_PARTITION), _by_rank(names, _OPTIMIZER)
    for name in (*whole.values(), *model.values(), *optimizer.values()):
        found = re.search(r"mp_rank_(\d+)", name)
        if found is not None and int(found.group(1)) != 0:
            raise Problem(f"{folder / name}: this checkpoint is split by tensor parallelism, which is not imported")
    if whole and model:
        raise Problem(f"{folder / next(iter(model.values()))}: is of ZeRO stage 3, but {whole[0]} beside it is not")
    if not whole and not model:
        raise Problem(f"{folder / 'mp_rank_00_model_states.pt'}: is absent, so there are no weights' names and shapes")
    for held in (model, optimizer):
        for rank in range(max(held, default=-1)):
            if rank not in held:
                lacking = next(iter(held.values())).replace(f"pp_rank_{min(held)}_", f"pp_rank_{rank}_")
                raise Problem(f"{folder / lacking}: is absent, so the part of rank {rank} is lost")
    chosen = whole or model
    return Files(
        folder,
        tuple(folder / chosen[rank] for rank in sorted(chosen)),
        tuple(folder / optimizer[rank] for rank in sorted(optimizer)),
    )


def _by_rank(names: list[str], form: re.Pattern[str]) -> dict[int, str]:
    found: dict[int, str] = {}
    for name in names:
        match = form.fullmatch(name)
        if match is not None:
            rank = int(match.groupdict().get("rank") or match.group("tp"))
            if rank in found:
                raise Problem(
                    f"{name}: {found[rank]} is there too, and both are of rank {rank}: files of two runs are mixed"
                )
            found[rank] = name
    return found
