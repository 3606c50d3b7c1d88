"""Whether DeepSpeed's files of one tag were written together: what each tells of the run must be the same in all.

Source of the keys: deepspeed/runtime/engine.py (0.19.8), _common_checkpoint_state and _save_zero_checkpoint;
deepspeed/runtime/zero/stage_1_and_2.py and stage3.py, state_dict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from dsplan.runtime.checkpoints.importing.folders import Files
from dsplan.runtime.checkpoints.importing.pickles import Inert
from dsplan.schemas.problem import Problem

OF_MODELS = (
    "global_steps", "skipped_steps", "global_samples", "dp_world_size", "ds_version", "ds_config", "lr_scheduler",
    "param_shapes", "frozen_param_shapes", "buffer_names",
)  # fmt: skip
OF_FILES = ("ds_version", "ds_config")
OF_OPTIMIZERS = ("zero_stage", "clip_grad", "dynamic_loss_scale", "overflow", "ds_version", "param_alignment_paddings")


def refuse_mixed_models(files: Files, models: Sequence[Mapping[str, Any]]) -> None:
    for path, model in zip(files.model, models, strict=True):
        _refuse_unlike(path, model, files.model[0], models[0], OF_MODELS)


def refuse_mixed_optimizers(files: Files, model: Mapping[str, Any], optimizers: Sequence[Mapping[str, Any]]) -> None:
    """optimizers: whole files, whose `optimizer_state_dict` is a mapping."""
    for path, held in zip(files.optimizer, optimizers, strict=True):
        _refuse_unlike(path, held, files.model[0], model, [key for key in OF_FILES if key in held])
        _refuse_unlike(
            path,
            held["optimizer_state_dict"],
            files.optimizer[0],
            optimizers[0]["optimizer_state_dict"],
            OF_OPTIMIZERS,
        )


def refuse_mixed_numbers(files: Files, states: Sequence[Mapping[str, Any]], scalers: Sequence[Any]) -> None:
    """states: of each rank, the torch optimizer's own state_dict. All that is not cut over the ranks must be the same."""
    for path, state, scaler in zip(files.optimizer, states, scalers, strict=True):
        if _shared(state, scaler) != _shared(states[0], scalers[0]):
            raise Problem(
                f"{path}: its optimizer's numbers (step, lr, loss scale) differ from those of {files.optimizer[0].name}; files "
                "of two checkpoints are mixed"
            )


def _refuse_unlike(
    path: Path, held: Mapping[str, Any], first: Path, others: Mapping[str, Any], keys: Sequence[str]
) -> None:
    for key in keys:
        mine, its = _plain(held.get(key)), _plain(others.get(key))
        if repr(mine) != repr(its):
            short = len(str(mine)) <= 40 and len(str(its)) <= 40
            differs = f"{key} {mine}, but {first.name} has {its}" if short else f"another {key} than {first.name}"
            raise Problem(f"{path}: has {differs}; files of two checkpoints are mixed")


def _shared(state: Mapping[str, Any], scaler: Any) -> list[Any]:
    groups = [{key: value for key, value in group.items() if key != "params"} for group in state["param_groups"]]
    arrays = [
        [
            index,
            *sorted((str(key), str(value.dtype) if is_array(value) else _number(value)) for key, value in held.items()),
        ]
        for index, held in state.get("state", {}).items()
    ]
    return [repr(groups), repr(arrays), repr(_plain(scaler))]


def _number(value: Any) -> Any:
    """DeepSpeed's own optimizers count steps in a number, torch's in a tensor."""
    return float(value) if isinstance(value, (int, float, torch.Tensor)) else repr(value)


def is_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _plain(value: Any) -> Any:
    return sorted(vars(value).items()) if isinstance(value, Inert) else value
