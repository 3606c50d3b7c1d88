"""DeepSpeed's files of one tag as one value, each kind of optimizer file told apart and held against the others."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from dsplan.runtime.checkpoints.importing.flat import Place, Stretch, cut_by_rank, cut_each
from dsplan.runtime.checkpoints.importing.folders import Files, files_of
from dsplan.runtime.checkpoints.importing.mixing import (
    is_array,
    refuse_mixed_models,
    refuse_mixed_numbers,
    refuse_mixed_optimizers,
)
from dsplan.runtime.checkpoints.importing.naming import names_in_flat, names_of
from dsplan.runtime.checkpoints.importing.pickles import ZeroStage, read_saved, zip_fault
from dsplan.schemas.problem import Problem

ALWAYS = ("buffer_names", "param_shapes", "lr_scheduler", "ds_config", "ds_version")
COUNTS = ("global_steps", "skipped_steps", "dp_world_size")
"""In every model file. Source: deepspeed/runtime/engine.py, _common_checkpoint_state."""
NO_PARTITION = "is no file that save_checkpoint of DeepSpeed writes"


@dataclass(frozen=True)
class Trained:
    """What the optimizer holds.

    places: of each parameter in `masters` and in the states; masters[array][rank], None where the model's own are the
    masters (stage 0 in fp32); states[array][rank] and groups as the optimizer's state_dict has them.
    """

    places: tuple[Place, ...]
    masters: Sequence[Sequence[torch.Tensor]] | None
    states: Sequence[Sequence[Mapping[str, Any]]]
    groups: tuple[Mapping[str, Any], ...]
    group_of: tuple[int, ...]
    """By array."""


@dataclass(frozen=True)
class Saved:
    files: Files
    model: Mapping[str, Any]
    """The model file of the first rank."""
    others: tuple[Mapping[str, Any], ...]
    """Those of the other ranks: at stage 3 alone."""
    optimizer: tuple[Mapping[str, Any], ...]
    """By rank: what the optimizer gave as its state_dict."""
    zero_stage: int

    @property
    def config(self) -> Mapping[str, Any]:
        config = self.model.get("ds_config")
        return config if isinstance(config, Mapping) else {}


def read_tag(folder: Path) -> Saved:
    """Problem that names the file which is damaged, absent, or of another step than the others."""
    with as_laid_out(folder):
        return _read(folder)


def _read(folder: Path) -> Saved:
    files = files_of(folder)
    models = [_mapping(path, "module") for path in files.model]
    states = [_mapping(path, "optimizer_state_dict") for path in files.optimizer]
    optimizer = tuple(state["optimizer_state_dict"] for state in states)
    for path, model in zip(files.model, models, strict=True):
        _refuse_incomplete(path, model)
    first = models[0]
    _refuse_parallel(files.model[0], first)
    refuse_mixed_models(files, models)
    ranks = int(first.get("dp_world_size") or 1)
    _refuse_other_count(folder, files, ranks, fewer=True)
    for path, state in zip(files.optimizer, optimizer, strict=True):
        if not isinstance(state, Mapping):
            raise Problem(f"{path}: {NO_PARTITION}")
        _refuse_other_world(path, state, len(files.optimizer))
    refuse_mixed_optimizers(files, first, states)
    refuse_mixed_numbers(
        files, [_inner(state) for state in optimizer], [state.get("loss_scaler") for state in optimizer]
    )
    partitioned = len(files.model) if files.model[0].name.startswith("zero_pp") else ranks
    if partitioned != ranks:
        raise Problem(
            f"{folder}: was written by {ranks} ranks, but there are model files of {partitioned}; "
            f"zero_pp_rank_{min(partitioned, ranks)}_mp_rank_00_model_states.pt is {'absent' if partitioned < ranks else 'too many'}"
        )
    _refuse_other_count(folder, files, ranks, fewer=False)
    if first.get("param_shapes") and not files.optimizer:
        raise Problem(
            f"{folder}: has no *_optim_states.pt, which hold the fp32 weights and the optimizer's state of each rank"
        )
    if not files.model[0].name.startswith("zero_pp"):
        _refuse_unlike_weights(files.model[0], first)
    return Saved(files, first, tuple(models[1:]), optimizer, _zero_stage(files, optimizer))


def refuse_damaged(saved: Saved) -> None:
    """Problem that names the file whose bytes are not those that were written: read_tag maps tensors, and reads none."""
    for path in (*saved.files.model, *saved.files.optimizer):
        fault = zip_fault(path)
        if fault is not None:
            raise Problem(fault)


def trained(saved: Saved) -> Trained | None:
    """What the optimizer holds; None where there was none."""
    if saved.optimizer:
        return _of_partitions(saved)
    inner = saved.model.get("optimizer")
    return _of_one_rank(saved, inner) if isinstance(inner, Mapping) else None


def _mapping(path: Path, key: str) -> Mapping[str, Any]:
    value = read_saved(path)
    if not isinstance(value, Mapping) or key not in value or (key == "module" and not isinstance(value[key], Mapping)):
        raise Problem(f"{path}: has no `{key}`, so it {NO_PARTITION}")
    return value


def _refuse_incomplete(path: Path, model: Mapping[str, Any]) -> None:
    for key in (*ALWAYS, *COUNTS):
        if key not in model:
            raise Problem(f"{path}: has no `{key}`, so it {NO_PARTITION}")
    for key in COUNTS:
        if type(model[key]) is not int or model[key] < 0:
            raise Problem(f"{path}: its {key} is {str(model[key])[:40]}, but must be a count")
    buffers = model["buffer_names"]
    if not isinstance(buffers, list) or any(
        not isinstance(model["module"].get(name), torch.Tensor) for name in buffers
    ):
        raise Problem(f"{path}: its buffer_names are not those of tensors in it")


def _refuse_unlike_weights(path: Path, model: Mapping[str, Any]) -> None:
    """At stages 1 and 2 the model file has every weight whole."""
    for name, shape in [pair for group in model["param_shapes"] or () for pair in group.items()]:
        held = model["module"].get(name)
        if not isinstance(held, torch.Tensor) or tuple(held.shape) != tuple(shape):
            what = f"of shape {list(held.shape)}" if isinstance(held, torch.Tensor) else "no tensor"
            raise Problem(f"{path}: {name} in it is {what}, but {list(shape)} in its param_shapes")


def _refuse_parallel(path: Path, model: Mapping[str, Any]) -> None:
    degrees = model.get("checkpoint_parallel_dimensions")
    degrees = degrees if isinstance(degrees, Mapping) else {}
    for degree, what in (("tp_degree", "tensor parallelism"), ("pp_degree", "a pipeline")):
        if degrees.get(degree, 1) != 1:
            raise Problem(f"{path}: this checkpoint is split by {what} ({degrees[degree]} ways), which is not imported")
    if model.get("mp_world_size", 1) != 1:
        raise Problem(f"{path}: this checkpoint is split by model parallelism, which is not imported")
    if model.get("num_experts"):
        raise Problem(f"{path}: this checkpoint holds a mixture of experts, which is not imported")


def _refuse_other_count(folder: Path, files: Files, ranks: int, *, fewer: bool) -> None:
    """Problem that names the first optimizer file which is absent, or one too many."""
    count = len(files.optimizer)
    if count and count != ranks and fewer == (count < ranks):
        name = files.optimizer[0].name.replace("pp_rank_0_", f"pp_rank_{min(count, ranks)}_")
        raise Problem(
            f"{folder}: was written by {ranks} ranks, but there are optimizer files of {count}; {name} is "
            f"{'absent' if fewer else 'too many'}"
        )


def _refuse_other_world(path: Path, state: Mapping[str, Any], files: int) -> None:
    counts = state.get("partition_count", files)
    for count in counts if isinstance(counts, list) else [counts]:
        if count != files:
            raise Problem(f"{path}: is one of {count} ranks' files, but there are {files}; files of two runs are mixed")


def _zero_stage(files: Files, optimizer: Sequence[Mapping[str, Any]]) -> int:
    if files.model[0].name.startswith("zero_pp"):
        return 3
    if not optimizer:
        return 0
    stage = optimizer[0].get("zero_stage")
    return int(stage.arguments[0]) if isinstance(stage, ZeroStage) else 1  # BF16_Optimizer does not say it


@contextlib.contextmanager
def as_laid_out(folder: Path) -> Iterator[None]:
    """Problem in place of what Python or torch say where a value in the files is of another kind than DeepSpeed's."""
    try:
        yield
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        line = str(error).strip().partition("\n")[0][:160]
        raise Problem(
            f"{folder}: its files are not laid out as DeepSpeed 0.19.8 does it ({type(error).__name__}: {line})"
        ) from error


def _inner(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The torch optimizer's own state_dict."""
    inner = state.get("base_optimizer_state", state.get("optimizer_state_dict", state))
    if not isinstance(inner, Mapping) or "param_groups" not in inner:
        raise Problem(
            "the optimizer's state is not as torch optimizers give it"
            + ("; checkpoint.elastic_checkpoint is not read" if isinstance(inner, list) else "")
        )
    return inner


def _of_partitions(saved: Saved) -> Trained:
    ranks = len(saved.optimizer)
    shapes = saved.model.get("param_shapes")
    if not isinstance(shapes, list):
        raise Problem(f"{saved.files.model[0]}: has no param_shapes, which say what the optimizer's files hold")
    key = "fp32_flat_groups" if saved.zero_stage == 3 else "single_partition_of_fp32_groups"
    for path, state in zip(saved.files.optimizer, saved.optimizer, strict=True):
        if not isinstance(state.get(key), list) or len(state[key]) != len(shapes):
            raise Problem(f"{path}: does not hold the {key} that the model's param_shapes speak of")
    inner = [_inner(state) for state in saved.optimizer]
    for path, state in zip(saved.files.optimizer, saved.optimizer, strict=True):
        if any(not is_array(held) or not held.is_floating_point() for held in state[key]):
            raise Problem(f"{path}: its {key} are no arrays of floating numbers")
    masters = [[state[key][array] for state in saved.optimizer] for array in range(len(shapes))]
    states = [[one["state"].get(array, {}) for one in inner] for array in range(len(shapes))]
    places: list[Place] = []
    for array, group in enumerate(shapes):
        where = f"{saved.files.folder}: "
        try:
            if saved.zero_stage == 3:
                found, wanted = cut_each(array, group, ranks)
                for held in [*masters[array], *_arrays(states[array])]:
                    if held.numel() != wanted:
                        raise Problem(f"sub-group {array} has {held.numel()} numbers on a rank instead of {wanted}")
            else:
                part = max(tensor.numel() for tensor in [*masters[array], *_arrays(states[array])])
                all_paddings = saved.optimizer[0].get("param_alignment_paddings")
                paddings = all_paddings[array] if all_paddings else [0] * len(group)
                found = cut_by_rank(array, group, paddings, part, ranks)
                _refuse_other_sizes(saved, array, sum(map(math.prod, group.values())) + sum(paddings), part)
        except (Problem, ValueError, TypeError) as error:
            raise Problem(f"{where}{error}") from error
        places += found
    groups = tuple(inner[0]["param_groups"])
    owner = {array: index for index, group in enumerate(groups) for array in group["params"]}
    if sorted(owner) != list(range(len(shapes))):
        raise Problem(f"{saved.files.optimizer[0]}: its groups do not count the {len(shapes)} arrays that it holds")
    return Trained(tuple(places), masters, states, groups, tuple(owner[array] for array in range(len(shapes))))


def _refuse_other_sizes(saved: Saved, array: int, numbers: int, part: int) -> None:
    """Of stages 1 and 2, where a rank's file tells the padding that it has: all of it is the last one's."""
    for rank, state in enumerate(saved.optimizer):
        paddings = state.get("group_paddings")
        last = rank == len(saved.optimizer) - 1
        padding = part * len(saved.optimizer) - numbers if last else 0
        if isinstance(paddings, list) and paddings[array] != padding:
            raise Problem(
                f"{saved.files.optimizer[rank].name} tells of {paddings[array]} numbers of padding in group {array}, but the model's "
                f"param_shapes leave {padding}; it is of another rank or checkpoint"
            )
        held = [state["single_partition_of_fp32_groups"][array], *_arrays([_inner(state)["state"].get(array, {})])]
        for tensor in held:
            if tensor.numel() not in (part, part - padding):
                raise Problem(
                    f"{saved.files.optimizer[rank].name} holds {tensor.numel()} numbers of group {array} instead of {part}"
                )


def _of_one_rank(saved: Saved, state: Mapping[str, Any]) -> Trained:
    """Stage 0: all in the one model file, and without names. What names neither values nor the file tell is `#position`."""
    path = saved.files.model[0]
    inner = _inner(state)
    groups = tuple(inner["param_groups"])
    positions = [key for group in groups for key in group["params"]]
    if positions != list(range(len(positions))) or any(key not in positions for key in inner["state"]):
        raise Problem(f"{path}: its optimizer's groups do not count the parameters that it has states of")
    candidates = {name: tensor for name, tensor in own_tensors(saved.model) if tensor.is_floating_point()}
    flat, each = state.get("fp32_groups_flat"), state.get("fp32_groups")
    places: list[Place] = []
    masters: list[list[torch.Tensor]] = []
    states: list[list[Mapping[str, Any]]] = []
    group_of: list[int] = []
    for index, group in enumerate(groups):
        lines = (
            [flat[index]]
            if flat is not None
            else list(each[index])
            if each is not None
            else [None] * len(group["params"])
        )
        if len(lines) != len(group["params"]):
            raise Problem(f"{path}: group {index} has {len(group['params'])} states, but {len(lines)} fp32 masters")
        if flat is not None:
            names = [names_in_flat(path, candidates, flat[index])]
        elif each is not None:
            names = [[name] for name in names_of(path, candidates, each[index])]
        else:
            names = [[name] for name in group.get("param_names") or [f"#{key}" for key in group["params"]]]
        for key, master, line in zip(group["params"], lines, names, strict=True):
            held = inner["state"].get(key, {})
            if len({tuple(value.shape) for value in _arrays([held])}) > 1:
                raise Problem(f"{path}: optimizer states of parameter {key} have several shapes")
            if (
                held
                and held.keys() != next(kept for one in group["params"] if (kept := inner["state"].get(one))).keys()
            ):
                raise Problem(f"{path}: parameter {key} has other optimizer states than the first of its group")
            start = 0
            for name in line:
                shape = tuple(candidates.pop(name).shape) if master is not None else _shape(held)
                places.append(Place(name, shape, len(group_of), (Stretch(0, start, start + math.prod(shape)),)))
                start += math.prod(shape)
            group_of.append(index)
            states.append([held])
            masters.append([] if master is None else [master])
    return Trained(tuple(places), masters if flat or each else None, states, groups, tuple(group_of))


def _shape(states: Mapping[str, Any]) -> tuple[int, ...]:
    return next((tuple(value.shape) for value in states.values() if is_array(value)), ())


def own_tensors(model: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters of a model file, each under the first of its names: no buffers, no placeholders."""
    buffers, shared = set(model.get("buffer_names") or ()), model.get("shared_params") or {}
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for name, tensor in model["module"].items():
        if name in buffers or name in shared or not isinstance(tensor, torch.Tensor):
            continue
        key = (tensor.data_ptr(), tuple(tensor.shape))
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        yield name, tensor


def _arrays(states: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
    return [value for state in states for value in state.values() if is_array(value)]
