"""Activations of a layer against Korthikanti et al. 2022 (arXiv:2205.05198), equations 1 to 6, and the micro-batches in
flight against Narayanan et al. 2021 (arXiv:2104.04473)."""

from fractions import Fraction
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from dsplan.planner.memory import ledgers
from dsplan.planner.memory.native_passes import Way, divided
from dsplan.planner.memory.native_widths import Widths
from dsplan.planner.memory.replay import in_flight
from dsplan.planner.models.load import ModelSubject
from dsplan.planner.tracing.tracer import trace
from dsplan.schemas.layout import Layout
from dsplan.schemas.plan import Plan
from torch import nn

S, B, H, A, LAYERS = 128, 2, 256, 4, 8
SBH, SQUARE = S * B * H, 5 * A * S / H
"""The paper counts in sbh bytes; SQUARE is its 5as/h."""


class Block(nn.Module):
    """The layer of the paper's figure 2, with its three dropouts and unfused attention."""

    def __init__(self):
        super().__init__()
        self.heads = A
        self.norm1 = nn.LayerNorm(H)
        self.q, self.k, self.v, self.out = (nn.Linear(H, H) for _ in range(4))
        self.norm2 = nn.LayerNorm(H)
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)
        self.dropped, self.dropped1, self.dropped2 = (nn.Dropout(0.1) for _ in range(3))

    def forward(self, x):
        batch, seq, width = x.shape
        y = self.norm1(x)
        q, k, v = (linear(y).view(batch, seq, A, width // A).transpose(1, 2) for linear in (self.q, self.k, self.v))
        mixed = self.dropped(torch.softmax(q @ k.transpose(-1, -2) * (width // A) ** -0.5, -1)) @ v
        x = x + self.dropped1(self.out(mixed.transpose(1, 2).reshape(batch, seq, width)))
        return x + self.dropped2(self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, H)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(H, 64, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@cache
def traced(recompute="none"):
    with torch.device("meta"):
        module = Stack()
    subject = ModelSubject(
        source="figure 2",
        kind="file",
        module=module,
        sample_batch=lambda micro_batch, seq_len: (torch.zeros(micro_batch, S, dtype=torch.long),),
        loss=lambda output, batch: output.float().mean(),
    )
    return trace(subject, precision="bf16", micro_batch=B, seq_len=S, recompute=recompute)


def a_layer(recompute="none") -> tuple[int, int]:
    """Bytes that a layer in the middle saves, and the part of them that tp divides."""
    of = [segment for segment in traced(recompute).segments if segment.phase == "forward" and segment.unit]
    middle = of[len(of) // 2]
    saved = middle.end.activation_bytes - middle.start.activation_bytes
    return saved, middle.end.split_bytes - middle.start.split_bytes


def on_a_rank(tp: int, sequence_parallel: bool) -> int:
    way = Way(
        zero_stage=0,
        degree=1,
        tp=tp,
        sequence_parallel=sequence_parallel,
        sp=1,
        accumulation=1,
        replicated=True,
        widths=Widths(compute=2, master=4, reduce=2),
    )
    return divided(*a_layer(), way)


def test_equation_1():
    assert a_layer()[0] == pytest.approx(SBH * (34 + SQUARE), rel=0.002)


@pytest.mark.parametrize("t", [2, 4])
def test_equation_2_tensor_parallel(t):
    assert on_a_rank(t, False) == pytest.approx(SBH * (10 + 24 / t + SQUARE / t), rel=0.002)


@pytest.mark.parametrize("t", [2, 4])
def test_equation_4_tensor_and_sequence_parallel(t):
    assert on_a_rank(t, True) == pytest.approx(SBH / t * (34 + SQUARE), rel=0.002)


def test_equation_6_of_full_recompute():
    """Section 5: only the input of each layer stays, 2sbh."""
    assert a_layer("full")[0] == pytest.approx(2 * SBH, rel=0.02)  # and the state of the random numbers


@pytest.mark.parametrize("p", [2, 4, 8])
def test_equation_5_the_first_stage_holds_as_much_as_all_layers(p):
    """1F1B: p micro-batches of L/p layers each, whatever p; the last stage one of them."""
    plan = Plan(
        engine="native",
        layout=Layout(pp=p),
        zero_stage=0,
        precision="bf16",
        micro_batch=B,
        accumulation=16,
        seq_len=S,
    )
    books = ledgers(traced(), plan)
    assert len(books) == p
    layer = a_layer()[0]
    held = [
        next(moment for moment in book.moments if moment.phase == "forward").category_bytes("activations")
        for book in books
    ]
    for stage, held_bytes in enumerate(held):
        layers = (p - stage) * LAYERS // p
        assert layers <= held_bytes / layer <= layers + 1, stage  # what runs, and what each stage is handed
    assert held == sorted(held, reverse=True)


def test_micro_batches_in_flight():
    """Narayanan et al. 2021, section 2.2: GPipe m, 1F1B p - stage, at most m; interleaved 1 + (p - 1)/(pv) times p."""
    layout = Layout(pp=4)
    assert [in_flight(layout, stage, 8, "gpipe", 1) for stage in range(4)] == [8] * 4
    assert [in_flight(layout, stage, 8, "1f1b", 1) for stage in range(4)] == [4, 3, 2, 1]
    assert [in_flight(layout, stage, 2, "1f1b", 1) for stage in range(4)] == [2, 2, 2, 1]
    assert in_flight(layout, 0, 8, "interleaved", 2) == 4 * (1 + Fraction(3, 4 * 2))
    assert in_flight(layout, 3, 8, "interleaved", 2) == Fraction(4 + 1, 2)
    assert in_flight(Layout(), 0, 8, "gpipe", 1) == 1, "without stages micro-batches follow each other"
