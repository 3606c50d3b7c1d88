"""What a real run holds: a model under the engine on this rank's process group, seen by the meter."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from nets import NETS
from torch import nn

GPT = Path(__file__).parents[2] / "examples" / "gpt.py"


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_gpt", GPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measured_ledger(
    sizes: dict[str, int],
    micro_batch: int,
    seq_len: int,
    precision: str,
    zero_stage: int,
    accumulation: int = 1,
    offload: str = "none",
    extra: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The meter's ledger of the second optimizer step of the example GPT, as JSON. extra: keys of the config, block by block."""
    gpt = example()
    tokens = torch.randint(sizes["vocab"], (micro_batch, seq_len))
    config = configuration(micro_batch, precision, zero_stage, accumulation)
    if offload != "none":
        config["zero_optimization"][f"offload_{offload}"] = {"device": "cpu"}
    for key, value in (extra or {}).items():
        config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
    return trained(gpt.build_model(**sizes), (tokens,), gpt.loss, config)


def measured_net(
    name: str, micro_batch: int, precision: str, zero_stage: int, accumulation: int, recompute: str
) -> dict[str, Any]:
    """The same of one of NETS."""
    net = NETS[name]
    torch.manual_seed(0)
    config = configuration(micro_batch, precision, zero_stage, accumulation) | {"dsplan": {"recompute": recompute}}
    return trained(net.build(), net.batch(micro_batch, None), net.loss, config)


def configuration(micro_batch: int, precision: str, zero_stage: int, accumulation: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": zero_stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    if precision == "fp16":  # small enough that no step is skipped
        config["fp16"] = {"enabled": True, "initial_scale_power": 4}
    elif precision != "fp32":
        config[precision] = {"enabled": True}
    return config


def trained(model: nn.Module, batch: Any, loss_of: Any, config: dict[str, Any]) -> dict[str, Any]:
    """Two optimizer steps of a loop that keeps its batch and its loss, under the meter."""
    from dsplan.runtime import initialize
    from dsplan.runtime.measuring.meter import Meter

    with contextlib.redirect_stderr(io.StringIO()):
        engine, *_ = initialize(model=model, config=config)
        meter = Meter(engine)
        engine.observers.append(meter)
        for _ in range(2 * config["gradient_accumulation_steps"]):
            output = engine(**batch) if isinstance(batch, dict) else engine(*batch)
            loss = output.loss if loss_of is None else loss_of(output, batch)
            del output
            engine.backward(loss)
            engine.step()
    assert meter.ledger is not None and engine.skipped_steps == 0
    return meter.ledger.to_json()
