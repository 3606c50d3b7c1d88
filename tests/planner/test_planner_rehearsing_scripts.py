"""A training script rehearsed in its own loop: as the model file that it trains, and what it says where it cannot be."""

import itertools
import os
from dataclasses import replace
from pathlib import Path

import pytest
from dsplan.planner.models.load import load_subject
from dsplan.planner.rehearsing.native import rehearsal
from dsplan.schemas.choices import OptimizerSpec
from dsplan.schemas.layout import Layout
from dsplan.schemas.ledger import STEP_PHASES
from dsplan.schemas.plan import Plan
from dsplan.schemas.problem import Problem

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x

def build_model():
    return Net()

def sample_batch(micro_batch, seq_len=None):
    return (torch.zeros(micro_batch, 64),)

def loss(output, batch):
    return output.square().mean()
"""
SCRIPT = """
import sys
import deepspeed
import torch
from net import build_model

model = build_model()
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config={
    "train_micro_batch_size_per_gpu": 8, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}})
data = [torch.randn(64) for _ in range(8 * int(sys.argv[1]))]
total = 0.0
for batch in torch.utils.data.DataLoader(data, batch_size=8, shuffle=True):
    output = engine(batch.to(engine.device))
    loss = output.square().mean()
    del output
    engine.backward(loss)
    if loss.item() > 100:
        raise SystemExit("diverged")
    engine.step()
    total += loss.item()
"""
PLAN = Plan(
    engine="native",
    layout=Layout(dp_shard=3),
    zero_stage=2,
    precision="bf16",
    micro_batch=8,
    accumulation=1,
    optimizer=OptimizerSpec(name="adamw", kernel="for-loop"),
)
SCALARS = 64
"""Bytes of the losses that the two loops keep at other times."""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(MODEL)

    def script(text=SCRIPT, *arguments):
        Path("train.py").write_text(text)
        return load_subject("train.py", script_args=arguments)

    return script


def phases(told):
    book = told.ledger
    return {phase: book.phase_bytes(phase) for phase in STEP_PHASES} | {"resident": book.resident_bytes}


def test_a_script_holds_what_the_model_file_that_it_trains_holds(script):
    """Its own optimizer, loop, loss and data, at another batch and plan than its own; then, with less data, too few steps."""
    plan = replace(PLAN, zero_stage=3, accumulation=2, precision="fp32", micro_batch=4, recompute="full")
    subject = script(SCRIPT, "6")
    told = rehearsal(subject, plan)
    assert sorted(os.listdir()) == ["net.py", "train.py"]  # not even what Python compiled
    of_file = rehearsal(load_subject("net.py"), plan)
    assert phases(told) == pytest.approx(phases(of_file), abs=SCALARS)
    assert told.ledger.collectives == of_file.ledger.collectives
    live = list(itertools.accumulate(delta for _, delta in told.events))
    assert max(live[told.resident :]) == pytest.approx(told.ledger.allocated_bytes, abs=SCALARS)

    subject.script_args = ("3",)
    with pytest.raises(Problem) as caught:
        rehearsal(subject, plan)
    assert str(caught.value) == (
        "train.py ends after deepspeed.initialize() without enough steps: a rehearsal takes 4 micro-batches (two optimizer "
        "steps), the script made 3; let it make more (arguments of the script go after --); the formula stands"
    )
