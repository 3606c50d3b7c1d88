"""state.json: all of an engine that is no tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dsplan.runtime.checkpoints.plain import encode
from dsplan.runtime.checkpoints.tensors import optimizer_numbers, plain_groups
from dsplan.schemas.problem import Problem

if TYPE_CHECKING:
    from dsplan.runtime.engine import Engine

COUNTERS = ("global_steps", "skipped_steps", "global_samples")


def state_text(
    engine: Engine, tag: str, client_state: Mapping[str, Any], *, latest: bool, left_out: frozenset[str]
) -> str:
    """Problem that names the key where the client's part, or the schedule's, does not fit into JSON."""
    if not isinstance(client_state, Mapping):
        raise Problem(f"client_state is a {type(client_state).__name__}, but must be a dict")
    schedule, loader = engine.lr_scheduler, engine.training_dataloader
    unfinished = engine.unfinished_micro_batches()  # their gradients are not saved: a resumed run begins that step anew
    state = {
        "version": 1,
        "tag": tag,
        "latest": latest,
        **{counter: getattr(engine, counter) for counter in COUNTERS},
        "micro_steps": engine.micro_steps - unfinished,
        "zero_stage": engine.zero_optimization_stage(),
        "world_size": engine.world_size,
        "train_batch_size": engine.train_batch_size(),
        "micro_batch": engine.train_micro_batch_size_per_gpu(),
        "accumulation": engine.gradient_accumulation_steps(),
        "precision": {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}[
            str(engine.compute_dtype).removeprefix("torch.")
        ],
        "left_out": sorted(left_out),
        "scalars": _scalars(engine),
        "loss_scale": engine.scaler.state_dict() if engine.scaler is not None else None,
        "optimizer_class": type(engine.optimizer).__name__ if engine.optimizer is not None else None,
        "optimizer": optimizer_numbers(engine) if engine.optimizer is not None else None,
        "groups": plain_groups(engine),
        "lr_scheduler": _schedule(schedule) if hasattr(schedule, "state_dict") else None,
        "data": loader.position(unused=unfinished) if loader is not None else None,
        "client_state": {key: encode(value, f"client_state[{key!r}]") for key, value in client_state.items()},
    }
    for key in client_state:
        if not isinstance(key, str):
            raise Problem(f"client_state has the key {key!r}, but keys must be words")
    return json.dumps(state, indent=1)


def _scalars(engine: Engine) -> list[str]:
    """Names of the model's tensors without a dimension, which files of shards hold as lists of one."""
    named = {**dict(engine.module.named_buffers()), **engine.masters()}
    return sorted(name for name, tensor in named.items() if tensor.dim() == 0)


def _schedule(schedule: Any) -> Any:
    return {
        key: encode(value, f"state {key} of the schedule {type(schedule).__name__}", tensors=True)
        for key, value in schedule.state_dict().items()
    }
