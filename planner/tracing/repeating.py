"""Which stretches of equal blocks a model repeats, and the model without the middle ones."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

KEPT, PATTERN = 5, 2
"""Repeats that are traced: the first three and the last two. Those left out do as the third, and the ones before and
after it must do so too: after it in forward, before it in backward, since the first that runs has no like before it."""
LONGEST_PERIOD = 12

Blocks = Sequence[tuple[str, nn.Module]]


@dataclass(frozen=True, slots=True)
class Run:
    """`repeats` equal stretches of `period` blocks each; `first` is the index of its first block."""

    first: int
    period: int
    repeats: int

    def blocks_of(self, repeat: int) -> range:
        begin = self.first + repeat * self.period
        return range(begin, begin + self.period)

    @property
    def left_out(self) -> range:
        """Indices of the blocks that are not traced."""
        return range(self.blocks_of(PATTERN).stop, self.blocks_of(self.true(PATTERN + 1)).start)

    def true(self, traced: int) -> int:
        """The number among all repeats of one of the KEPT that are traced."""
        return traced if traced <= PATTERN else self.repeats - KEPT + traced


def find_runs(blocks: Blocks) -> list[Run]:
    """Stretches of equal blocks that follow each other in one container, long enough that leaving some out saves work.

    Equal: the same classes, settings, parameters and buffers all through, by shape, dtype and whether they are trained.
    Of numbers with a point only the sign counts (rates of dropout). Blocks that share a parameter are no such stretch.
    """
    seen: dict[Any, int] = {}
    shared = _shared(blocks)
    kinds = [
        -1 - index if index in shared else seen.setdefault(_kind(*block), len(seen))
        for index, block in enumerate(blocks)
    ]
    runs = []
    begin = 0
    while begin < len(blocks):
        found = _longest(kinds, begin)
        if found is None:
            begin += 1
        else:
            runs.append(found)
            begin = found.first + found.period * found.repeats
    return runs


def _longest(kinds: Sequence[int], begin: int) -> Run | None:
    """The run at `begin` that leaves out the most blocks."""
    best = None
    for period in range(1, LONGEST_PERIOD + 1):
        end = begin + period
        while end < len(kinds) and kinds[end] == kinds[end - period]:
            end += 1
        run = Run(begin, period, (end - begin) // period)
        if run.repeats > KEPT and (best is None or len(run.left_out) > len(best.left_out)):
            best = run
    return best


def _shared(blocks: Blocks) -> set[int]:
    """Blocks that hold a parameter of another block."""
    holders: dict[int, set[int]] = {}
    for index, (_, block) in enumerate(blocks):
        for param in block.parameters():
            holders.setdefault(id(param), set()).add(index)
    return {index for found in holders.values() if len(found) > 1 for index in found}


_NUMBERS = ("layer_idx", "layer_id", "layer_number", "layer_index", "block_idx", "index", "idx", "layer", "layer_num")
"""Settings that number a block."""


def _kind(name: str, block: nn.Module) -> Any:
    """What decides a block's work: its container, and the classes, settings and shapes of all it holds."""
    parts: list[Any] = [name.rpartition(".")[0]]
    for inner, module in block.named_modules():
        own = module.__dict__
        settings = tuple((key, _setting(value)) for key, value in sorted(own.items()) if key not in _NUMBERS)
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        held = tuple((key, tuple(held.shape), held.dtype, held.requires_grad) for key, held in tensors)
        parts.append((inner, type(module), settings, held))
    return tuple(parts)


_FUNCTIONS = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType)


def _setting(value: Any) -> Any:
    if isinstance(value, float):
        return (value > 0) - (value < 0), value == 1
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (tuple, list, set, frozenset)):
        return tuple(map(_setting, sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value))
    if isinstance(value, _FUNCTIONS):
        return value.__module__, value.__qualname__
    if isinstance(value, functools.partial):
        return (
            _setting(value.func),
            _setting(value.args),
            tuple((key, _setting(member)) for key, member in value.keywords.items()),
        )
    if isinstance(value, Mapping):
        return len(value)  # of hooks, parameters, submodules
    return type(value).__qualname__


@contextlib.contextmanager
def left_out(model: nn.Module, blocks: Blocks, runs: Sequence[Run]) -> Iterator[None]:
    """The model without the middle blocks of each run; afterwards they are back."""
    before: dict[nn.Module, dict[str, nn.Module | None]] = {}
    for run in runs:
        container = model.get_submodule(blocks[run.first][0].rpartition(".")[0])
        before.setdefault(container, dict(container._modules))
        for index in run.left_out:
            del container._modules[blocks[index][0].rpartition(".")[2]]
    try:
        yield
    finally:
        for container, members in before.items():
            container._modules.clear()
            container._modules.update(members)
