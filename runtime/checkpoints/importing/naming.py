"""At ZeRO stage 0 DeepSpeed keeps fp32 masters without their names: their values tell, rounded as the model has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from dsplan.schemas.problem import Problem


def same_values(low: torch.Tensor, master: torch.Tensor) -> bool:
    """Whether the model's tensor is the master in its own precision; nan is nan."""
    low, rounded = low.flatten(), master.detach().flatten().to(low.dtype)
    return low.shape == rounded.shape and bool(((low == rounded) | (low.isnan() & rounded.isnan())).all())


def names_of(path: Path, model: Mapping[str, torch.Tensor], masters: Sequence[torch.Tensor]) -> list[str]:
    """For each master the name of the model's tensor that is it, in low precision; in the model's order where two are alike."""
    left = dict(model)
    names = []
    for index, master in enumerate(masters):
        fitting = (name for name, low in left.items() if low.shape == master.shape and same_values(low, master))
        name = next(fitting, None)
        if name is None:
            raise Problem(_unlike(path, f"fp32 master {index}, of shape {list(master.shape)},"))
        del left[name]
        names.append(name)
    return names


def names_in_flat(path: Path, model: Mapping[str, torch.Tensor], flat: torch.Tensor) -> list[str]:
    """The names of the model's tensors that lie end to end in one array of masters."""
    left, start = dict(model), 0
    names: list[str] = []
    while start < flat.numel():
        name = next(
            (
                name
                for name, low in left.items()
                if 0 < low.numel() <= flat.numel() - start and same_values(low, flat[start : start + low.numel()])
            ),
            None,
        )
        if name is None:
            if bool((flat[start:] == 0).all()):  # padding
                return names
            raise Problem(_unlike(path, f"what lies from number {start} of its fp32 masters"))
        start += left.pop(name).numel()
        names.append(name)
    return names


def _unlike(path: Path, what: str) -> str:
    return f"{path}: {what} is none of the model's tensors in its precision, so its name is unknown; files or values are mixed"
