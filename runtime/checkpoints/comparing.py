"""Whether a checkpoint is of this model: every name and shape, before anything is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dsplan.schemas.problem import Problem

SHOWN = 5


@dataclass(frozen=True)
class Differences:
    """absent: what the run has and the checkpoint has not; surplus: the other way round; shapes: what differs in shape."""

    absent: tuple[str, ...]
    surplus: tuple[str, ...]
    shapes: tuple[str, ...]


def compare(wanted: Mapping[str, Iterable[int]], held: Mapping[str, Iterable[int]]) -> Differences:
    return Differences(
        tuple(name for name in wanted if name not in held),
        tuple(name for name in held if name not in wanted),
        tuple(
            f"{name} is {list(held[name])} there and {list(shape)} here"
            for name, shape in wanted.items()
            if name in held and tuple(held[name]) != tuple(shape)
        ),
    )


def refuse_other_model(path: str, found: Differences, *, strict: bool) -> None:
    """Problem with the first differences. Not strict: what has one shape on both sides is loaded."""
    lines = list(found.shapes)
    if strict:
        lines += [f"{name} is absent there" for name in found.absent]
        lines += [f"{name} is absent here" for name in found.surplus]
    if lines:
        more = f"; and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
        raise Problem(
            f"{path} is a checkpoint of another model: {'; '.join(lines[:SHOWN])}{more}; build the model as when it was saved"
            + ("" if found.shapes else ", or load with load_module_strict=False")
        )
