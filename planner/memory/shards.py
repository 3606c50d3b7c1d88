"""How many elements and bytes of each unit one rank holds: tp splits tensors, the dp shards split their first dim."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from dsplan.planner.memory.replay import unit_kinds
from dsplan.schemas.optimizer import OptimizerSpec, product, state_bytes, step_temporary_elements
from dsplan.schemas.trace import Param, Trace, Unit
from dsplan.schemas.units import PRECISION_BYTES
from numpy.typing import NDArray

Counts = NDArray[np.int64]
FP32 = 4


@dataclass(frozen=True, slots=True)
class Shards:
    """Per unit (arrays by unit index; one more entry, 0, so that index -1 means no unit).

    In elements. whole: on one tp rank. padded: the same with each tensor's first dim padded to a multiple of the shards, as
    FSDP2 lays out its flat buffers. shard: the part of rank 0, which is the largest. trainable_*: without frozen parameters.
    In bytes, which tell quantised weights and those that are no floats from the others: master_bytes, of the shard as it lies
    between steps (fp32, or as it is stored); gathered_bytes, of the padded copies in use; gathered_shard_bytes, of this
    rank's part of them. stored_*: those that lie as they are stored, without an fp32 master, in elements and bytes.
    """

    whole: Counts
    padded: Counts
    shard: Counts
    master_bytes: Counts
    gathered_bytes: Counts
    gathered_shard_bytes: Counts
    trainable: Counts
    trainable_padded: Counts
    trainable_shard: Counts
    largest: int
    """Elements of the largest single tensor on one tp rank."""
    largest_shard: int
    tensors: Counts
    """Trainable tensors."""
    largest_by_unit: Counts
    stored: Counts
    stored_shard: Counts
    stored_shard_bytes: Counts
    ratio: NDArray[np.float64]
    """By unit: the part of its elements that one tp rank holds."""
    last_trained: Counts
    """Elements of the trainable tensor that FSDP2 lists last in the unit."""
    cast_excess: Counts
    """What tensor-by-tensor casting of the unit takes at most beyond the unit itself."""
    trained_shapes: tuple[tuple[tuple[int, ...], ...], ...]
    """By unit: the local shards of its trainable tensors."""

    def sums(self, units: tuple[int, ...]) -> dict[str, int]:
        """Each column over these units."""
        return {name: int(getattr(self, name)[list(units)].sum()) for name in _COLUMNS}

    def optimizer_state_bytes(self, spec: OptimizerSpec, units: tuple[int, ...]) -> int:
        kinds: dict[tuple[tuple[int, ...], ...], int] = {}
        total = 0
        for unit in units:
            shapes = self.trained_shapes[unit]
            if shapes not in kinds:
                kinds[shapes] = state_bytes(spec, shapes)
            total += kinds[shapes]
        return total

    def step_temporaries(self, spec: OptimizerSpec, units: tuple[int, ...]) -> int:
        """Elements. The largest temporaries of a loop over tensors come from two neighbours, and of foreach from all."""
        numels = [product(shape) for unit in units for shape in self.trained_shapes[unit]]
        return step_temporary_elements(spec, numels)


def local_numel(param: Param, tp: int) -> int:
    """Elements of the parameter on the fullest tp rank."""
    return product(local_shape(param, tp))


def local_shape(param: Param, tp: int, dp_shard: int = 1) -> tuple[int, ...]:
    """Shape of the parameter on the fullest rank: tp splits its tp_dim, and then the shards its first dim.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py, _init_sharded_param (chunks of dim 0, padded).
    """
    shape = list(param.shape)
    if tp > 1 and param.tp_dim is not None:
        shape[param.tp_dim] = -(-shape[param.tp_dim] // tp)
    if shape:
        shape[0] = -(-shape[0] // dp_shard)
    return tuple(shape)


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
    if part == "all" or not params or opening is None or opening.unit:
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
    """Sizes of every unit at these degrees; remembered per trace. Unit 0 is the named part of what lies outside the blocks."""
    key = (id(trace), tp, dp_shard, part)
    found = _remembered.get(key)
    if found is None or found[0] is not trace:
        if len(_remembered) > 512:
            _remembered.clear()
        found = _remembered[key] = (trace, _shards(trace, tp, dp_shard, part))
    return found[1]


_remembered: dict[tuple[int, int, int, Part], tuple[Trace, Shards]] = {}


@dataclass(frozen=True, slots=True)
class _Sizes:
    """One unit's entries of Shards, under the same names."""

    whole: int
    padded: int
    shard: int
    master_bytes: int
    gathered_bytes: int
    gathered_shard_bytes: int
    trainable: int
    trainable_padded: int
    trainable_shard: int
    tensors: int
    largest_by_unit: int
    stored: int
    stored_shard: int
    stored_shard_bytes: int
    last_trained: int
    cast_excess: int
    largest_shard: int
    trained_shapes: tuple[tuple[int, ...], ...]


def _shards(trace: Trace, tp: int, dp_shard: int, part: Part) -> Shards:
    width = PRECISION_BYTES[trace.precision]
    rows: list[_Sizes] = []
    kinds = unit_kinds(trace)
    for index, unit in enumerate(trace.units):
        if index == 0:
            rows.append(_sizes(outside_blocks(trace, part), tp, dp_shard, width))
        elif 0 < kinds[index] < index:
            rows.append(rows[kinds[index]])
        else:
            rows.append(_sizes(unit.params, tp, dp_shard, width))
    arrays = {name: np.array([*(getattr(row, name) for row in rows), 0], dtype=np.int64) for name in _COLUMNS}
    return Shards(
        **arrays,
        ratio=_ratio(trace.units, kinds, tp),
        largest=max(row.largest_by_unit for row in rows),
        largest_shard=max(row.largest_shard for row in rows),
        trained_shapes=tuple(row.trained_shapes for row in rows),
    )


_COLUMNS = (
    "whole",
    "padded",
    "shard",
    "master_bytes",
    "gathered_bytes",
    "gathered_shard_bytes",
    "trainable",
    "trainable_padded",
    "trainable_shard",
    "tensors",
    "largest_by_unit",
    "stored",
    "stored_shard",
    "stored_shard_bytes",
    "last_trained",
    "cast_excess",
)


def _sizes(params: tuple[Param, ...], tp: int, dp_shard: int, width: int) -> _Sizes:
    """width: bytes of the compute dtype."""
    sums = dict.fromkeys(_COLUMNS, 0)
    made = previous = excess = largest_shard = 0
    trained: list[tuple[int, ...]] = []
    for param in params:
        shape = local_shape(param, tp, dp_shard)
        whole, shard = local_numel(param, tp), product(shape)
        excess = max(excess, made + previous + whole, made + 2 * whole)  # the last cast lives until the next is made
        made, previous = made + whole, whole
        sums["largest_by_unit"] = max(sums["largest_by_unit"], whole)
        largest_shard = max(largest_shard, shard)
        floats = param.stored_bytes is None and (param.dtype_bytes == width or param.trainable)
        gathered = -(-param.held_bytes * shard // max(param.numel, 1))
        master = FP32 * shard if floats else gathered  # what is no float stays as it is
        added = {"whole": whole, "padded": shard * dp_shard, "shard": shard, "master_bytes": master}
        added |= {"gathered_bytes": gathered * dp_shard, "gathered_shard_bytes": gathered}
        if not floats:
            added |= {"stored": whole, "stored_shard": shard, "stored_shard_bytes": gathered}
        if param.trainable:
            added |= {"trainable": whole, "trainable_padded": shard * dp_shard, "trainable_shard": shard, "tensors": 1}
            trained.append(shape)
        for name, value in added.items():
            sums[name] += value
    sums["cast_excess"] = excess - made
    sums["last_trained"] = local_numel(last, tp) if (last := last_listed(params)) else 0
    return _Sizes(**sums, largest_shard=largest_shard, trained_shapes=tuple(trained))


def last_listed(params: tuple[Param, ...]) -> Param | None:
    """The trainable parameter that FSDP2 lists last: children come before a module's own parameters.

    params go by module, as in named_parameters. Source: torch/distributed/fsdp/_fully_shard/_fsdp_init.py
    (_get_managed_modules).
    """
    left = [(param.name.split("."), param) for param in params if param.trainable]
    depth = 0
    while len(left) > 1:
        own = [entry for entry in left if len(entry[0]) == depth + 1]
        if own:
            return own[-1][1]
        left = [entry for entry in left if entry[0][depth] == left[-1][0][depth]]
        depth += 1
    return left[0][1] if left else None


def _ratio(units: tuple[Unit, ...], kinds: tuple[int, ...], tp: int) -> NDArray[np.float64]:
    found: list[float] = []
    for index, unit in enumerate(units):
        if kinds[index] < index:
            found.append(found[kinds[index]])
            continue
        numel = unit.numel
        found.append(sum(local_numel(param, tp) for param in unit.params) / numel if numel else 1.0)
    return np.array([*found, 1.0])
