"""What FSDP2 does per rank though one rank is rehearsed: done for that rank alone, so that a thousand ranks cost what two do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import _sharding_prop
from torch.distributed.tensor.placement_types import _StridedShard


class Parts(Sequence[torch.Tensor]):
    """A tensor's parts along dim, as torch.chunk cuts them and empty ones beyond; each is made when it is asked for."""

    def __init__(self, tensor: torch.Tensor, number: int, dim: int):
        self._tensor, self._number, self._dim = tensor, number, dim
        self._size = -(-tensor.size(dim) // number)

    def __len__(self) -> int:
        return self._number

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[torch.Tensor]: ...
    def __getitem__(self, index: int | slice) -> torch.Tensor | list[torch.Tensor]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(self._number))]
        if not -self._number <= index < self._number:
            raise IndexError(index)
        begin = index % self._number * self._size
        left = self._tensor.size(self._dim) - begin
        if left <= 0 < self._size:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, begin, min(self._size, left))


class StridedFlag:
    """torch's _propagate_use_strided_shard_flag, which reads all of an operator's tensors again for each of its tensors.

    Where none of them is strided, which one look tells, it does nothing. Source: torch 2.13,
    torch/distributed/tensor/_sharding_prop.py; a fused optimizer is one operator on all parameters and states.
    """

    def __init__(self, own: Callable[[Any, Any], None]):
        self._own = own
        self._seen: tuple[Any, bool] = (None, False)

    def __call__(self, op_strategy: Any, op_schema: Any) -> None:
        if self._seen[0] is not op_schema:
            strided = any(
                isinstance(placement, _StridedShard) for spec in op_schema.args_spec for placement in spec.placements
            )
            self._seen = (op_schema, strided)
        if self._seen[1]:
            self._own(op_strategy, op_schema)


@contextlib.contextmanager
def one_look_at_strides() -> Iterator[None]:
    """DTensor's sharding rules with `StridedFlag`, where this torch has such a flag."""
    names = vars(_sharding_prop)
    own = names.get(_FLAG)
    if own is not None:
        names[_FLAG] = StridedFlag(own)
    try:
        yield
    finally:
        if own is not None:
            names[_FLAG] = own


_FLAG = "_propagate_use_strided_shard_flag"


@contextlib.contextmanager
def parts_when_asked() -> Iterator[None]:
    """FSDP2 cuts each parameter into all ranks' shards, twice, and keeps one.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py (_init_sharded_param), _fsdp_common.py (_chunk_with_empty).
    """
    names = vars(_fsdp_param)
    before = names["_chunk_with_empty"]
    names["_chunk_with_empty"] = Parts
    try:
        yield
    finally:
        names["_chunk_with_empty"] = before
