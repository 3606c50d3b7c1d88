"""Shards made when asked for are those that FSDP2 cuts; strides are looked at once where torch finds nothing to do."""

from types import SimpleNamespace

import pytest
import torch
from dsplan.planner.rehearsing.fsdp_aids import Parts, StridedFlag, one_look_at_strides
from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty
from torch.distributed.tensor import Shard, _sharding_prop
from torch.distributed.tensor.placement_types import _StridedShard


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


@pytest.mark.parametrize(("placement", "asked"), [(Shard(0), 0), (_StridedShard(0, split_factor=2), 3)])
def test_the_flag_of_strides_is_left_to_torch_where_a_tensor_is_strided(placement, asked):
    calls: list[object] = []
    flag = StridedFlag(lambda strategy, schema: calls.append(strategy))
    schema = SimpleNamespace(
        args_spec=[SimpleNamespace(placements=(Shard(1),)), SimpleNamespace(placements=(placement,))]
    )
    for child in range(3):
        flag(child, schema)
    assert calls == list(range(asked))


def test_torchs_own_flag_does_nothing_where_no_tensor_is_strided():
    own = _sharding_prop._propagate_use_strided_shard_flag
    plain = SimpleNamespace(args_spec=[SimpleNamespace(placements=(Shard(0),))])
    own(None, plain)  # it would read the strategy, which is none
    with one_look_at_strides():
        assert isinstance(_sharding_prop._propagate_use_strided_shard_flag, StridedFlag)
    assert _sharding_prop._propagate_use_strided_shard_flag is own
