"""Where each parameter lies in the flat arrays of DeepSpeed's ranks.

    stages 1, 2   the parameters of a group end to end, padded, and the whole cut into one equal part for each rank
    stage 3       each parameter cut into one equal part for each rank; a rank's parts of a sub-group lie end to end

Source: deepspeed/runtime/zero/stage_1_and_2.py and stage3.py (0.19.8), state_dict; deepspeed/utils/zero_to_fp32.py reads
the same. At stage 0 an array is one parameter, or one group, of one rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from dsplan.schemas.problem import Problem

Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Stretch:
    """Numbers start..stop of one rank's array."""

    rank: int
    start: int
    stop: int


@dataclass(frozen=True)
class Place:
    """One parameter: its shape, the array that it lies in (as the optimizer counts them), and its stretches there in order."""

    name: str
    shape: tuple[int, ...]
    array: int
    stretches: tuple[Stretch, ...]


def cut_by_rank(array: int, shapes: Shapes, paddings: Sequence[int], part: int, ranks: int) -> list[Place]:
    """Of a group at stages 1 and 2. part: numbers in one rank's array; paddings: numbers after each parameter."""
    places, start = [], 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        stop = start + math.prod(shape)
        stretches = tuple(
            Stretch(rank, max(start, rank * part) - rank * part, min(stop, (rank + 1) * part) - rank * part)
            for rank in range(ranks)
            if max(start, rank * part) < min(stop, (rank + 1) * part)
        )
        places.append(Place(name, tuple(shape), array, stretches))
        start = stop + padding
    if places and start - paddings[-1] > part * ranks:
        raise Problem(f"group {array} has {start} numbers, but the {ranks} ranks' parts of it hold {part * ranks}")
    return places


def cut_each(array: int, shapes: Shapes, ranks: int) -> tuple[list[Place], int]:
    """Of a sub-group at stage 3, and how many numbers each rank's array must have."""
    places, start = [], 0
    for name, shape in shapes.items():
        numbers = math.prod(shape)
        part = math.ceil(numbers / ranks)
        stretches = tuple(
            Stretch(rank, start, start + min(part, numbers - rank * part))
            for rank in range(ranks)
            if rank * part < numbers
        )
        places.append(Place(name, tuple(shape), array, stretches))
        start += part
    return places, start


def put_together(place: Place, arrays: Sequence[torch.Tensor]) -> torch.Tensor:
    """The parameter, fp32 or as it lies there, from that array of every rank."""
    pieces = [arrays[part.rank].detach().flatten()[part.start : part.stop] for part in place.stretches]
    wanted = math.prod(place.shape)
    if sum(piece.numel() for piece in pieces) != wanted:
        raise Problem(
            f"{place.name} has {wanted} numbers, but the ranks' arrays hold {sum(map(torch.numel, pieces))} of them"
        )
    whole = torch.cat(pieces) if len(pieces) > 1 else pieces[0].clone() if pieces else torch.empty(0)
    return whole.reshape(place.shape)
