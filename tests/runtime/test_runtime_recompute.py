"""What a recomputed block holds between forward and backward, by hand, and that its gradients stay."""

import copy

import pytest
import torch
from dsplan.runtime.measuring.storages import StorageTracker
from dsplan.runtime.recompute import KEPT, apply_recompute
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
