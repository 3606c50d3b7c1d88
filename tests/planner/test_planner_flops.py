"""FLOPs against formulas written by hand."""

import json

import pytest
import torch
import torch.nn.functional as F
from dsplan.planner.models.load import load_subject
from dsplan.planner.tracing.flops import FLOP_COUNTER, FVCORE
from dsplan.planner.tracing.tracer import trace
from models import LAYERS, Residual, residual, subject
from torch import nn


def flops(make, *shape, dtype=torch.float32):
    return trace(subject(make, lambda batch, seq: (torch.zeros(*shape, dtype=dtype),)), precision="fp32")


def test_each_unit_has_its_own():
    traced = trace(residual(), precision="fp32", micro_batch=8)
    assert traced.flops_source == FVCORE
    assert [unit.forward_flops for unit in traced.units] == [
        2 * 8 * Residual.root_macs,
        *LAYERS * [2 * 8 * Residual.block_macs],
    ]
    assert traced.forward_flops == 2 * 8 * (Residual.root_macs + LAYERS * Residual.block_macs)


def test_precision_and_recompute_change_no_count():
    model = residual()
    counts = {trace(model, precision=p, recompute=r).forward_flops for p in ("fp32", "bf16") for r in ("none", "full")}
    assert len(counts) == 1


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_llama_is_its_matrices_and_attention(tmp_path, layers):
    """2 x (parameters of matrices) x tokens + 4 x s^2 x hidden x layers: two products of full s x s scores."""
    hidden, inner, heads, kv, vocab, length = 64, 160, 4, 2, 1000, 48
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        "max_position_embeddings": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    traced = trace(load_subject(str(tmp_path), seq_len=length), precision="bf16")
    attention = 2 * hidden * hidden + 2 * hidden * hidden * kv // heads
    block = 2 * length * (attention + 3 * hidden * inner) + 4 * length**2 * hidden
    if layers > 1:
        assert [unit.forward_flops for unit in traced.blocks] == layers * [block]
    assert traced.forward_flops == layers * block + 2 * length * hidden * vocab
    assert traced.flops_source == FVCORE


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding="same")
        self.second = nn.Conv2d(8, 16, 3, stride=2, padding=1, groups=2)
        self.up = nn.ConvTranspose2d(16, 4, 2, stride=2)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x):
        return self.norm(self.up(self.second(self.first(x))))


def test_convolutions_of_every_kind():
    first = 16 * 16 * 8 * 3 * 9
    second = 8 * 8 * 16 * (8 // 2) * 9
    up = 8 * 8 * 16 * 4 * 4
    assert flops(Convolutions, 5, 3, 16, 16).forward_flops == 2 * 5 * (first + second + up)


class Products(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(6, 7))

    def forward(self, x):  # x: [2, 3, 5, 6]
        y = x @ self.weight  # 2*3*5 x 6 x 7
        z = torch.einsum("bhqd,bhkd->bhqk", y, y)  # 2*3 x 5 x 5 x 7
        w = torch.baddbmm(z.flatten(0, 1), z.flatten(0, 1), z.flatten(0, 1))  # 6 x 5 x 5 x 5
        return (self.weight.t() @ x[0, 0].t() @ w).sum()  # 7 x 6 x 5, then 6 of 7 x 5 x 5 by broadcast


def test_products_of_every_kind():
    macs = 30 * 6 * 7 + 6 * 25 * 7 + 6 * 125 + 7 * 6 * 5 + 6 * 7 * 25
    assert flops(Products, 2, 3, 5, 6).forward_flops == 2 * macs


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.rms = nn.RMSNorm(16)

    def forward(self, x):  # [batch, heads, length, 16]
        return F.scaled_dot_product_attention(self.norm(x), self.rms(x), x, is_causal=True)


def test_attention_counts_and_norms_do_not():
    assert flops(Attention, 2, 3, 10, 16).forward_flops == 2 * (2 * 3 * 10 * 10 * (16 + 16))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.long = nn.LSTM(4, 8, batch_first=True)
        self.gated = nn.GRU(8, 6, batch_first=True)

    def forward(self, x):
        return self.gated(self.long(x)[0])[0]


def test_recurrent_layers_multiply_input_and_state_by_all_gates():
    steps = 2 * 5
    traced = flops(Recurrent, 2, 5, 4)
    assert traced.forward_flops == 2 * steps * (4 * 8 * (4 + 8) + 3 * 6 * (8 + 6))
    assert not any("FLOPs of forward" in note for note in traced.notes), "torch's counter comes to the same"


class Crossed(nn.Module):
    def __init__(self):
        super().__init__()
        self.cross = nn.Bilinear(4, 4, 8)

    def forward(self, x):
        return self.cross(x, x)


def test_an_operator_without_a_formula_is_named():
    traced = flops(Crossed, 2, 5, 4)
    assert any("aten::bilinear (1 times) has no formula" in note for note in traced.notes)


class Depthwise(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Conv2d(3, 32, 1)
        self.each = nn.Conv2d(32, 32, 3, padding=1, groups=32)

    def forward(self, x):
        return self.each(self.enter(x))


def test_backward_of_grouped_convolutions_multiplies_within_their_groups():
    """Two products as large as forward's; the first layer needs none for its input."""
    enter, each = 16 * 16 * 3 * 32, 16 * 16 * 32 * 3 * 3
    traced = flops(Depthwise, 2, 3, 16, 16)
    assert traced.forward_flops == 2 * 2 * (enter + each)
    assert traced.backward_flops == 2 * 2 * (enter + 2 * each)


class Branching(nn.Module):
    """Reads a value: fvcore cannot trace it, and neither can meta tensors."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        if x.sum() > 0:
            x = self.linear(x)
        return self.linear(x)


def test_where_fvcore_cannot_trace_the_counter_takes_over_and_says_so():
    traced = flops(Branching, 3, 4)
    assert traced.flops_source == FLOP_COUNTER
    assert traced.forward_flops == 2 * 3 * 4 * 4, "the branch that is not taken is not counted"
    assert any("value is read" in note for note in traced.notes)


class Alternating(nn.Module):
    """Equal parameters, other settings: the second block's convolution skips every other place."""

    class Step(nn.Module):
        def __init__(self, stride):
            super().__init__()
            self.conv = nn.Conv1d(4, 4, 3, stride=stride, padding=1)

        def forward(self, x):
            return self.conv(x)

    def __init__(self):
        super().__init__()
        self.steps = nn.ModuleList(self.Step(stride) for stride in (1, 2, 1))

    def forward(self, x):
        for step in self.steps:
            x = step(x)
        return x


def test_blocks_that_only_look_equal_are_counted_one_by_one():
    traced = flops(Alternating, 1, 4, 16)
    assert [unit.forward_flops for unit in traced.blocks] == [2 * 16 * 48, 2 * 8 * 48, 2 * 8 * 48]


class Shared(nn.Module):
    """One block that runs three times."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))

    def forward(self, x):
        for block in (self.blocks[0], self.blocks[0], self.blocks[0], self.blocks[1]):
            x = block(x)
        return x


def test_a_block_that_runs_three_times_counts_three_times():
    assert [unit.forward_flops for unit in flops(Shared, 1, 4).blocks] == [3 * 32, 32]


def test_llama_7b_by_hand(tmp_path):
    """Matrices: (parameters - embedding) x tokens; attention: two products of s x s x hidden per layer."""
    hidden, layers, vocab, inner, length = 4096, 32, 32000, 11008, 4096
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": vocab,
        "max_position_embeddings": length,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    traced = trace(load_subject(str(tmp_path), seq_len=length), precision="bf16")
    linear = layers * (4 * hidden**2 + 3 * hidden * inner) * length + hidden * vocab * length
    attention = layers * 2 * length**2 * hidden
    assert (round(linear / 1e12, 4), round(attention / 1e12, 3)) == (27.0626, 4.398)
    assert traced.forward_flops == 2 * (linear + attention)
    assert len({unit.forward_flops for unit in traced.blocks}) == 1
    # two products for each one of forward; fused attention makes its scores once more, so five for two (Dao 2023)
    assert traced.backward_flops == 2 * (2 * linear + 2.5 * attention)
    assert traced.recompute_flops == 0
    again = trace(load_subject(str(tmp_path), seq_len=length), precision="bf16", recompute="full")
    # the head is outside the blocks, and each block stops before its last product, whose output nothing keeps
    # (torch/utils/checkpoint.py, set_checkpoint_early_stop)
    spared = hidden * vocab * length + layers * hidden * inner * length
    assert (again.backward_flops, again.recompute_flops) == (traced.backward_flops, traced.forward_flops - 2 * spared)
    assert not any("FLOPs" in note for note in traced.notes)


def test_frozen_weights_have_no_gradient_to_count():
    """The last of three linears is trained alone: one product for its weight, and none on the way to the frozen ones."""

    def make():
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        for linear in model[:2]:
            linear.requires_grad_(False)
        return model

    assert flops(make, 5, 4).backward_flops == 2 * 5 * 4 * 4


def test_a_disagreement_of_the_two_counters_is_shown():
    """Two linears of 4 x 4 on three rows in a real step, one of them alone in what torch.jit sees."""

    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x) if torch._C._is_tracing() else self.linear(self.linear(x))

    [note] = [note for note in flops(Hidden, 3, 4).notes if "by torch's counter" in note]
    assert "96 by fvcore, 192 by torch's counter" in note
