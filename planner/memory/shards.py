"""How many elements of each unit one rank holds: tp splits tensors, the dp shards split their first dim."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from dsplan.schemas.trace import Param, Trace
from numpy.typing import NDArray

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Shards:
    """Elements per unit (arrays by unit index; one more entry, 0, so that index -1 means no unit).

    whole: on one tp rank. padded: the same with each tensor's first dim padded to a multiple of the shards, as FSDP2 lays
    out its flat buffers. shard: the part of rank 0, which is the largest. trainable_*: without frozen parameters.
    """

    whole: Counts
    padded: Counts
    shard: Counts
    trainable: Counts
    trainable_padded: Counts
    trainable_shard: Counts
    largest: int
    """Elements of the largest single tensor on one tp rank."""
    largest_shard: int
    tensors: Counts
    """Trainable tensors."""
    largest_by_unit: Counts
    ratio: NDArray[np.float64]
    """By unit: the part of its elements that one tp rank holds."""
    cast_excess: Counts
    """What tensor-by-tensor casting of the unit takes at most beyond the unit itself."""


def local_numel(param: Param, tp: int) -> int:
    """Elements of the parameter on the fullest tp rank."""
    if tp == 1 or param.tp_dim is None:
        return param.numel
    length = param.shape[param.tp_dim]
    return param.numel // length * -(-length // tp)


Part = Literal["all", "first", "last"]
"""Which of the parameters outside the blocks: all, or those of the first or last pipeline stage."""


def part_of(pp: int, pp_stage: int) -> Part:
    return "all" if pp == 1 else "first" if pp_stage == 0 else "last"


def outside_blocks(trace: Trace, part: Part) -> tuple[Param, ...]:
    """The parameters outside the blocks that a pipeline stage holds.

    Those of the last stage are told by their gradients, which exist before any block's backward: as many of the trailing
    parameters. The first stage holds the others, and an embedding: a tied one is on both.
    """
    params = trace.units[0].params
    opening = next((s for s in trace.segments if s.phase == "backward"), None)
    if part == "all" or opening is None or opening.unit:
        return params
    width = max(param.dtype_bytes for param in params)
    wanted, taken, cut = opening.end.grad_bytes // width, 0, len(params)
    while cut and taken < wanted:
        cut -= 1
        taken += params[cut].numel
    if part == "last":
        return params[cut:]
    largest = max(params, key=lambda param: param.numel)
    first = params[:cut]
    return first if any(2 * param.numel > largest.numel for param in first) else (*first, largest)


def shards(trace: Trace, tp: int, dp_shard: int, part: Part = "all") -> Shards:
    """Sizes of every unit at these degrees; remembered per trace. Unit 0 is the named part of what lies outside the blocks.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py, _init_sharded_param (chunks of dim 0, padded).
    """
    key = (id(trace), tp, dp_shard, part)
    found = _remembered.get(key)
    if found is None or found[0] is not trace:
        if len(_remembered) > 512:
            _remembered.clear()
        found = _remembered[key] = (trace, _shards(trace, tp, dp_shard, part))
    return found[1]


_remembered: dict[tuple[int, int, int, Part], tuple[Trace, Shards]] = {}


def _shards(trace: Trace, tp: int, dp_shard: int, part: Part) -> Shards:
    columns = {name: [0] * (len(trace.units) + 1) for name in _COLUMNS}
    largest = largest_shard = 0
    for index, unit in enumerate(trace.units):
        made = previous = excess = 0
        for param in outside_blocks(trace, part) if index == 0 else unit.params:
            whole = local_numel(param, tp)
            rows = param.shape[0] if param.shape else 1
            if tp > 1 and param.tp_dim == 0:
                rows = -(-rows // tp)
            shard = -(-rows // dp_shard) * (whole // rows) if rows else 0
            largest, largest_shard = max(largest, whole), max(largest_shard, shard)
            excess = max(
                excess, made + previous + whole, made + 2 * whole
            )  # the last cast lives until the next is made
            made, previous = made + whole, whole
            columns["largest_by_unit"][index] = max(columns["largest_by_unit"][index], whole)
            for name, value in (("whole", whole), ("padded", shard * dp_shard), ("shard", shard)):
                columns[name][index] += value
            if param.trainable:
                columns["trainable"][index] += whole
                columns["trainable_padded"][index] += shard * dp_shard
                columns["trainable_shard"][index] += shard
                columns["tensors"][index] += 1
        columns["cast_excess"][index] = excess - made
    arrays = {name: np.array(values, dtype=np.int64) for name, values in columns.items()}
    full = np.array([*(unit.numel for unit in trace.units), 0])
    held = np.array([*(sum(local_numel(param, tp) for param in unit.params) for unit in trace.units), 0])
    ratio = np.divide(held, full, out=np.ones(full.shape), where=full > 0)
    return Shards(**arrays, ratio=ratio, largest=largest, largest_shard=largest_shard)


_COLUMNS = (
    "whole",
    "padded",
    "shard",
    "trainable",
    "trainable_padded",
    "trainable_shard",
    "tensors",
    "largest_by_unit",
    "cast_excess",
)
