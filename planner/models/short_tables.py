"""A sequence that a table of positions, or of masks, is too short for: told by the shapes that do not go together."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from typing import Any

_LENGTHS = (
    re.compile(r"size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\)"),
    re.compile(r"expanded size of the tensor \((\d+)\) must match the existing size \((\d+)\)"),
)
_BROADCAST = re.compile(r"dimension of length (\d+) at (-\d+)! .* broadcastable to \[([\d, ]+)\]")
"""Source: torch/_refs/__init__.py (_broadcast_shapes); aten/src/ATen/ExpandUtils.cpp."""


def short_table(error: BaseException) -> str | None:
    """The way round where two lengths do not go together and a table of the model has just the shorter one; else None."""
    lengths = _two_lengths(" ".join(str(error).split())) if isinstance(error, RuntimeError) else None
    if lengths is None:
        return None
    shorter, longer = sorted(lengths)
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get(next(iter(frame.f_code.co_varnames), ""))
        names = [name for name, rows in _tables(module) if shorter in rows]
        if names:
            return (
                f"{' and '.join(names[:2])} {'has' if len(names) == 1 else 'have'} length {shorter} where {longer} is needed: feed a "
                f"shorter sequence (--seq-len {shorter}), or make the table longer"
            )
    return None


def _two_lengths(text: str) -> tuple[int, int] | None:
    for pattern in _LENGTHS:
        if found := pattern.search(text):
            return int(found[1]), int(found[2])
    if found := _BROADCAST.search(text):
        shape, place = [int(length) for length in found[3].split(",")], int(found[2])
        if -place <= len(shape):
            return int(found[1]), shape[place]
    return None


def _tables(module: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, lengths that may be a sequence's): buffers, embeddings, and parameters that no layer owns."""
    from torch import nn

    if not isinstance(module, nn.Module):
        return
    for name, buffer in module.named_buffers():
        yield name, tuple(buffer.shape[:-1] if buffer.is_floating_point() and buffer.dim() > 1 else buffer.shape)
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding):
            yield f"{name}.weight", (part.num_embeddings,)
        elif not type(part).__module__.startswith("torch."):
            for own, param in part.named_parameters(name, recurse=False):
                yield own, tuple(param.shape[:-1])
