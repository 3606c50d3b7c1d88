"""What a real run holds: the example GPT under the engine on this rank's process group, seen by the meter."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

GPT = Path(__file__).parents[2] / "examples" / "gpt.py"


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_gpt", GPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measured_ledger(
    sizes: dict[str, int], micro_batch: int, seq_len: int, precision: str, zero_stage: int, accumulation: int = 1
) -> dict[str, Any]:
    """The meter's ledger of the second optimizer step, as JSON."""
    from dsplan.runtime import initialize
    from dsplan.runtime.meter import Meter

    gpt = example()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": zero_stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    with contextlib.redirect_stderr(io.StringIO()):
        engine, *_ = initialize(model=gpt.build_model(**sizes), config=config)
        meter = engine.observer = Meter(engine)
        tokens = torch.randint(sizes["vocab"], (micro_batch, seq_len))
        for _ in range(2 * accumulation):
            loss = gpt.loss(engine(tokens), (tokens,))
            engine.backward(loss)
            engine.step()
    assert meter.ledger is not None and engine.skipped_steps == 0
    return meter.ledger.to_json()
