"""Shards made when asked for are those that FSDP2 cuts."""

import pytest
import torch
from dsplan.planner.rehearsing.fsdp_aids import Parts
from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty


@pytest.mark.parametrize(
    ("shape", "number", "dim"),
    [((7, 3), 4, 0), ((8, 3), 4, 0), ((2, 3), 8, 0), ((5,), 3, 0), ((1,), 64, 0), ((3, 8), 4, 1), ((0, 3), 2, 0)],
)
def test_parts_are_those_that_fsdp_cuts(shape, number, dim):
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape)
    cut = _chunk_with_empty(tensor, number, dim)
    parts = Parts(tensor, number, dim)
    assert len(parts) == len(cut)
    assert [part.shape for part in parts] == [part.shape for part in cut]
    assert all(torch.equal(part, other) for part, other in zip(parts, cut, strict=True))
    assert torch.equal(parts[-1], cut[-1])
