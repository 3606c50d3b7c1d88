"""Experts chosen by the data: balanced, as a real step is whose data choose them so; what other data decide is refused."""

import pytest
import torch
import torch.nn.functional as F
from dsplan.planner.tracing.tracer import trace
from dsplan.runtime.measuring.storages import StorageTracker
from dsplan.schemas.problem import Problem
from models import subject
from torch import nn

WIDTH, INNER, EXPERTS, TAKEN, TOKENS = 16, 24, 8, 2, 64


class Experts(nn.Module):
    """Top-2 of 8. Its router is laid so that row r of the identity takes experts 2r and 2r + 1: real routing is balanced."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(EXPERTS, EXPERTS, bias=False)
        self.enter = nn.Linear(EXPERTS, WIDTH, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, INNER, bias=False) for _ in range(EXPERTS))

    def forward(self, tokens):
        weights, taken = self.gate(tokens).softmax(-1).topk(TAKEN, dim=-1)
        hidden = self.enter(tokens)
        return self.routed(hidden, weights, taken).square().mean()


class ByWhere(Experts):
    """As transformers' Mixtral: a mask per expert, its rows by torch.where."""

    def routed(self, hidden, weights, taken):
        out = hidden.new_zeros(len(hidden), INNER)
        mask = F.one_hot(taken, EXPERTS).permute(2, 1, 0)
        for hit in (mask.sum((-1, -2)) > 0).nonzero():
            expert = hit[0]
            place, rows = torch.where(mask[expert])
            out = out.index_add(0, rows, self.experts[int(expert)](hidden[rows]) * weights[rows, place, None])
        return out


class ByMask(Experts):
    def routed(self, hidden, weights, taken):
        out = hidden.new_zeros(len(hidden), INNER)
        for index, expert in enumerate(self.experts):
            chosen = (taken == index).any(-1)
            if chosen.any():
                out = out.index_put((chosen,), expert(hidden[chosen]), accumulate=True)
        return out


class BySplit(Experts):
    def routed(self, hidden, weights, taken):
        order = taken.flatten().argsort(stable=True)
        counts = torch.bincount(taken.flatten(), minlength=EXPERTS).tolist()
        parts = hidden[order // TAKEN].split(counts)
        return torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])


def fed(micro_batch, seq_len):
    rows = torch.arange(TOKENS) % (EXPERTS // TAKEN)
    return (F.one_hot(rows, EXPERTS).float(),)


def balanced(model):
    with torch.no_grad():
        model.gate.weight.zero_()
        for row in range(EXPERTS // TAKEN):
            model.gate.weight[TAKEN * row : TAKEN * (row + 1), row] = 9.0
    return model


@pytest.mark.parametrize("kind", [ByWhere, ByMask, BySplit])
def test_balanced_experts_hold_what_a_real_balanced_step_holds(kind):
    """Forward's end, to the byte: what it saves depends on how many rows each expert gets."""
    model = balanced(kind())
    batch = fed(1, None)
    tracker = StorageTracker()
    for param in model.parameters():
        tracker.add(param, "state")
    with tracker:
        loss = model(*batch)
        held = tracker.live["other"]
    assert loss.requires_grad
    traced = trace(subject(kind, fed), precision="fp32", micro_batch=1)
    forward = [segment for segment in traced.segments if segment.phase == "forward"][-1]
    assert forward.end.activation_bytes == held + batch[0].nbytes
    assert "each is taken to get its equal share, tokens x 2 / 8" in " ".join(traced.notes)


@pytest.mark.parametrize("kind", [ByWhere, ByMask, BySplit])
def test_balanced_experts_multiply_each_token_by_those_it_takes(kind):
    """Router, entry, and TAKEN experts a token, by hand; two products of each in backward, one where the input is data."""
    router, entry = EXPERTS * EXPERTS, EXPERTS * WIDTH
    experts = TAKEN * WIDTH * INNER
    traced = trace(subject(kind, fed), precision="fp32", micro_batch=1)
    assert traced.forward_flops == 2 * TOKENS * (router + entry + experts)
    weighs = kind is ByWhere  # the others leave the router's weights aside
    assert traced.backward_flops == 2 * TOKENS * (router * weighs + entry + 2 * experts)


def test_constants_keep_their_values():
    class Windows(nn.Linear):
        def forward(self, x):
            steps = int(torch.tensor([2, 3]).cumsum(0)[-1].item()) + torch.arange(4).max().item()
            return sum(super(Windows, self).forward(x).mean() for _ in range(steps))

    traced = trace(subject(lambda: Windows(4, 4), lambda rows, length: (torch.zeros(rows, 4),)), precision="fp32")
    assert traced.forward_flops == 8 * 2 * 4 * 4, "5 of a tensor of numbers and 3 of a range"
    assert not any("value is read" in note for note in traced.notes)


def test_rows_that_the_data_choose_are_refused():
    class Positive(nn.Linear):
        def forward(self, x):
            return super().forward(x).sum() + x[x > 0].sum()

    with pytest.raises(Problem, match="shape depends on the values of the data"):
        trace(subject(lambda: Positive(4, 4), lambda rows, length: (torch.zeros(rows, 4),)), precision="fp32")
