"""What tune writes: plan.json, and the DeepSpeed JSON of a plan."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsplan.planner.models.load import Subject
from dsplan.schemas import native_support
from dsplan.schemas.cluster import Cluster
from dsplan.schemas.config import read_config
from dsplan.schemas.estimate import ModelFacts, Row
from dsplan.schemas.offloading import offloading
from dsplan.schemas.optimizer import OPTIMIZER_TYPES
from dsplan.schemas.plan import Plan, PlanFile
from dsplan.schemas.problem import Problem
from dsplan.schemas.tuned import Tuned

DEFAULT_LEARNING_RATE = 1e-3
"""Source: torch.optim.AdamW and deepspeed/ops/adam/fused_adam.py, default of lr."""
DEFAULT_MOMENTUM = 0.9
"""For SGD that the arguments say keeps a momentum, without its size. Source: torchvision's reference training scripts."""


def plan_file(row: Row, facts: ModelFacts, cluster: Cluster, base: Mapping[str, Any], subject: Subject) -> PlanFile:
    plan = row.plan
    config = tuned_config(base, plan, with_optimizer=subject.optimizer is None)
    if plan.engine == "native":
        _refuse_what_launch_would(config)
    return PlanFile(
        model={"source": facts.source, "params": facts.params, "shapes_sha256": facts.shapes_sha256},
        cluster=cluster.to_json(),
        engine=plan.engine,
        layout=plan.layout,
        zero_stage=plan.zero_stage,
        precision=plan.precision,
        micro_batch=plan.micro_batch,
        accumulation=plan.accumulation,
        recompute=plan.recompute,
        offload=plan.offload,
        ds_config=config,
        predicted=row.to_json(),
    )


def _refuse_what_launch_would(config: Mapping[str, Any]) -> None:
    """Keys of the configuration that is tuned, beside those that the plan decides."""
    wrong = [
        f"{pointer[1:].replace('/', '.')}: {text}"
        for pointer, level, text in native_support.reasons(config)
        if level == "error"
    ]
    if wrong:
        raise Problem(f"engine native cannot carry out this configuration, whatever the plan: {'; '.join(wrong)}")


def write(tuned: Tuned, folder: Path) -> None:
    """plan.json and ds_config.json into the folder, which is made where it is missing."""
    assert tuned.plan is not None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in (("plan.json", tuned.plan.to_json()), ("ds_config.json", tuned.plan.ds_config)):
            target = folder / name
            aside = folder / f".{name}.new"
            aside.write_text(json.dumps(value, indent=2) + "\n", "utf-8")
            aside.replace(target)
    except OSError as error:
        raise Problem(f"{error.filename or folder}: cannot be written ({error.strerror})") from error


def tuned_config(base: Mapping[str, Any], plan: Plan, *, with_optimizer: bool) -> dict[str, Any]:
    """The DeepSpeed JSON of a plan: every key that the plan decides is said, all others stay as in `base`."""
    config: dict[str, Any] = copy.deepcopy(dict(base))
    config["train_batch_size"] = plan.global_batch
    config["train_micro_batch_size_per_gpu"] = plan.micro_batch
    config["gradient_accumulation_steps"] = plan.accumulation
    for name in ("fp16", "bf16"):  # both said, so that a script's own precision never stays on beside it
        block = config.get(name)
        config[name] = {**(block if isinstance(block, dict) else {}), "enabled": plan.precision == name}
    config.pop("bfloat16", None)
    zero = config.get("zero_optimization")
    config["zero_optimization"] = {**(zero if isinstance(zero, dict) else {}), "stage": plan.zero_stage}
    native = plan.engine == "native"
    said = offloading(config, plan.zero_stage).what if native else read_config(config).offload
    if said != plan.offload:
        for name in ("optimizer", "param"):
            config["zero_optimization"].pop(f"offload_{name}", None)
        for name in {"none": (), "optimizer": ("optimizer",), "param": ("optimizer", "param")}[plan.offload]:
            config["zero_optimization"][f"offload_{name}"] = {"device": "cpu"}
    if with_optimizer and not config.get("optimizer") and plan.optimizer.state_dtype == "fp32":
        params: dict[str, Any] = {"lr": DEFAULT_LEARNING_RATE}
        if plan.optimizer.momentum:
            params["momentum"] = DEFAULT_MOMENTUM
        config["optimizer"] = {"type": OPTIMIZER_TYPES[plan.optimizer.name], "params": params}
    own = config.get("dsplan")
    config["dsplan"] = {**(own if isinstance(own, dict) else {}), "recompute": plan.recompute}
    return config
