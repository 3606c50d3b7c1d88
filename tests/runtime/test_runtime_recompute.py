"""What a recomputed block holds between forward and backward, by hand, and that its gradients stay."""

import copy

import pytest
import torch
from dsplan.runtime.measuring.storages import StorageTracker
from dsplan.runtime.recompute import KEPT, apply_recompute
from dsplan.schemas.problem import Problem
from torch import nn

ROWS, WIDTH = 6, 8
FP32 = 4


class Block(nn.Module):
    """x -> x + down(gelu(up(x))), up to four times the width."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


@pytest.mark.parametrize(
    ("policy", "widths"),
    [
        # x is the caller's. First block: up(x), gelu; its sum feeds the second: up, gelu. The last sum is the result.
        ("none", 4 + 4 + 1 + 4 + 4 + 1),
        # The first sum is the second block's input.
        ("full", 1 + 1),
        # And up and down of both.
        ("selective", 4 + 1 + 1 + 4 + 1 + 1),
    ],
)
def test_what_a_block_keeps_for_backward(policy, widths):
    made = model()
    x = torch.randn(ROWS, WIDTH)
    apply_recompute(made, policy)
    with StorageTracker() as tracker:
        tracker.add(x, "given")
        weights = sum(parameter.numel() for parameter in made.parameters()) * FP32
        for parameter in made.parameters():
            tracker.add(parameter, "given")
        output = made(x)
        held = tracker.total_bytes - x.numel() * FP32 - weights
    assert output.shape == x.shape
    assert held == widths * ROWS * WIDTH * FP32


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_gradients_stay(policy):
    plain = model()
    changed = copy.deepcopy(plain)
    assert apply_recompute(changed, policy) == 2
    x = torch.randn(ROWS, WIDTH)
    for made in (plain, changed):
        made(x).square().sum().backward()
    for one, other in zip(plain.parameters(), changed.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_kept_operators_exist():
    assert [name for name in KEPT if not hasattr(torch.ops.aten, name)] == []


class Cache:
    """As transformers' DynamicCache, of one block."""

    def __init__(self) -> None:
        self.keys = torch.empty(0, WIDTH)

    def get_seq_length(self) -> int:
        return len(self.keys)

    def update(self, keys: torch.Tensor) -> torch.Tensor:
        self.keys = torch.cat([self.keys, keys])
        return self.keys


class Attending(Block):
    def forward(self, x: torch.Tensor, cache: Cache | None = None, use_cache: bool = False) -> torch.Tensor:
        keys = x if cache is None else cache.update(x)
        assert use_cache is (cache is not None)
        return super().forward(x + (x @ keys.T).softmax(-1) @ keys)


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("by_name", [True, False])
def test_a_cache_of_keys_is_not_filled_a_second_time_in_backward(policy, by_name):
    plain = nn.Sequential(Attending(), Attending())
    again = copy.deepcopy(plain)
    apply_recompute(again, policy)
    x = torch.randn(ROWS, WIDTH)
    for made in (plain, again):
        y = x
        for block in made:
            y = block(y, cache=Cache(), use_cache=True) if by_name else block(y, Cache(), use_cache=True)
        y.square().mean().backward()
    for mine, other in zip(again.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)  # summed up in another order
    with torch.no_grad():  # generation keeps its cache
        again[0](x, cache := Cache(), use_cache=True)
        assert cache.get_seq_length() == ROWS


def test_a_filled_cache_of_keys_is_refused_where_blocks_are_computed_again():
    made = nn.Sequential(Attending(), Attending())
    apply_recompute(made, "full")
    cache = Cache()
    cache.update(torch.randn(2, WIDTH))
    with pytest.raises(Problem, match="a cache of keys and values that is filled already"):
        made[0](torch.randn(ROWS, WIDTH), cache=cache, use_cache=True)
