"""What linears with frozen weights keep under stage 3, against real tensors and a linear that saves its input."""

import pytest
import torch
from dsplan.planner.memory.kept_inputs import as_run
from dsplan.planner.models.load import ModelSubject
from dsplan.planner.tracing.tracer import trace
from dsplan.runtime.measuring.storages import StorageTracker
from dsplan.runtime.recompute import apply_recompute
from dsplan.schemas.choices import ZeroKnobs
from dsplan.schemas.layout import Layout
from dsplan.schemas.plan import Plan
from torch import nn

WIDTH, INNER, ROWS = 16, 40, 32
BLOCKS = 7


class Block(nn.Module):
    """A frozen pair of linears beside a trained adapter, as LoRA lays it."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH, bias=False)
        self.low, self.high = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, INNER, bias=False)
        for frozen in (*self.up.parameters(), *self.down.parameters()):
            frozen.requires_grad_(False)

    def forward(self, x):
        return x + self.down(2 * (self.up(x) + self.high(self.low(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.last = nn.Linear(WIDTH, INNER)
        self.last.weight.requires_grad_(False)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class SavingLinear(torch.autograd.Function):
    """As runtime/zero/linear.py of DeepSpeed: input and weight are saved, whichever is trained."""

    @staticmethod
    def forward(ctx, input, weight, bias=None):
        ctx.save_for_backward(input, weight, bias)
        return torch._C._nn.linear(input, weight, bias)

    @staticmethod
    def backward(ctx, gradient):
        input, weight, bias = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        of_input = gradient.matmul(weight) if wanted[0] else None
        of_weight = gradient.t().matmul(input) if wanted[1] else None
        return of_input, of_weight, gradient.sum(0) if bias is not None and wanted[2] else None


def plan(zero_stage, **knobs):
    return Plan(
        engine="deepspeed",
        layout=Layout(dp_shard=8),
        zero_stage=zero_stage,
        precision="fp32",
        micro_batch=ROWS,
        accumulation=1,
        knobs=ZeroKnobs(**knobs),
    )


def traced(recompute):
    subject = ModelSubject(
        source="model",
        kind="file",
        module=Model(),
        sample_batch=lambda micro_batch, seq_len: (torch.zeros(micro_batch, WIDTH),),
        loss=lambda output, batch: output.sum(),
    )
    return trace(subject, precision="fp32", recompute=recompute, micro_batch=ROWS, count_flops=False)


def levels(events):
    """Activations live after each event."""
    live, found = 0, []
    for storage, delta in zip(events.storage, events.delta_bytes, strict=True):
        live += delta if events.label[storage] < 0 else 0
        found.append(live)
    return found


def kept_after_forward(model, recompute):
    """Bytes that a real forward leaves for backward, by torch's linear as it is at the time."""
    apply_recompute(model, recompute)
    batch = torch.zeros(ROWS, WIDTH)
    tracker = StorageTracker()
    with tracker:
        for param in model.parameters():
            tracker.add(param, "state")
        tracker.add(batch, "input")
        loss = model(batch).sum()
        held = tracker.total_bytes - tracker.live["state"]
    loss.backward()
    return held


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_what_forward_leaves_is_that_of_a_linear_that_saves_its_input(recompute, monkeypatch):
    found = traced(recompute)
    end = next(segment for segment in found.segments if segment.phase == "backward").first_event - 1
    before = kept_after_forward(Model(), recompute)
    assert levels(found.events)[end] == before
    monkeypatch.setattr(torch.nn.functional, "linear", SavingLinear.apply)
    after = kept_after_forward(Model(), recompute)
    assert levels(as_run(found, plan(3)).events)[end] == after
    assert after - before == 4 * ROWS * (WIDTH + (BLOCKS * INNER if recompute == "none" else 0))


def test_other_stages_and_torchs_linear_keep_nothing_more():
    found = traced("none")
    assert as_run(found, plan(2)) is found
    assert as_run(found, plan(3, memory_efficient_linear=False)) is found
    assert as_run(found, plan(3)) is as_run(found, plan(3))
    assert levels(as_run(found, plan(3)).events)[-1] == levels(found.events)[-1]
