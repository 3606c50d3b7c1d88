"""What FSDP2 does per rank though one rank is rehearsed: done for that rank alone, so that a thousand ranks cost what two do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import overload

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param


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
