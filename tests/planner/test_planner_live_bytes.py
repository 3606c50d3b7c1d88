"""Traces in fp32 against the peak of live tensors that torch's MemTracker saw in a plain step (tests/oracle/live_bytes.py)."""

import json
from pathlib import Path

import pytest
from dsplan.planner.tracing.tracer import trace
from models import subject
from nets import NETS

ROWS = json.loads((Path(__file__).parents[1] / "oracle" / "live_bytes.json").read_text())["rows"]


def peak_bytes(traced, model):
    """Of a loop that keeps all gradients until the step, where the trace drops them block by block."""
    state = {id(held): held.nbytes for held in [*model.parameters(), *model.buffers()]}
    live = most = sum(state.values())
    kept = set()
    events = traced.events
    for storage, delta in zip(events.storage, events.delta_bytes, strict=True):
        if delta == 0:
            kept.add(storage)
        elif delta > 0 or storage not in kept:
            live += delta
            most = max(most, live)
    return most


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['net']}-{row['micro_batch']}x{row['length']}")
def test_the_traced_peak_is_that_of_a_plain_step(row):
    net = NETS[row["net"]]
    traced = subject(net.build, net.batch, net.loss)
    found = trace(traced, precision="fp32", micro_batch=row["micro_batch"], seq_len=row["length"])
    assert peak_bytes(found, traced.module) == row["peak_bytes"]
