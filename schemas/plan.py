"""Plan: everything that decides bytes and seconds on a given model and cluster, and the file that records a chosen one."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from dsplan.schemas.choices import Built, Offload, OptimizerSpec, PipelineSchedule, Recompute, ZeroKnobs
from dsplan.schemas.config import read_config
from dsplan.schemas.layout import Layout
from dsplan.schemas.offloading import offloading
from dsplan.schemas.validation import schema_errors

Engine = Literal["native", "deepspeed"]
ENGINES: tuple[Engine, ...] = ("native", "deepspeed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One candidate. Layout's dp x micro_batch x accumulation is the global batch."""

    engine: Engine
    layout: Layout
    zero_stage: int
    precision: str
    micro_batch: int
    accumulation: int
    seq_len: int | None = None
    recompute: Recompute = "none"
    offload: Offload = "none"
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    knobs: ZeroKnobs = field(default_factory=ZeroKnobs)
    built: Built = "host"
    schedule: PipelineSchedule = "1f1b"
    sequence_parallel: bool = False
    """Megatron's, with tp: what tp does not divide is split along the sequence."""
    virtual_stages: int = 1
    """Model chunks per pipeline rank, under schedule interleaved."""

    @property
    def global_batch(self) -> int:
        return self.micro_batch * self.accumulation * self.layout.dp


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """plan.json. `predicted` is a row of estimate, `ds_config` the tuned DeepSpeed configuration."""

    model: dict[str, Any]
    """source, params, shapes_sha256"""
    cluster: dict[str, Any]
    engine: Engine
    layout: Layout
    zero_stage: int
    precision: str
    micro_batch: int
    accumulation: int
    recompute: Recompute
    offload: Offload
    ds_config: dict[str, Any]
    predicted: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        degrees = {name: getattr(self.layout, name) for name in ("dp_replicate", "dp_shard", "tp", "pp", "sp")}
        return {
            "version": 1,
            "model": self.model,
            "cluster": self.cluster,
            "engine": self.engine,
            "layout": degrees,
            "zero_stage": self.zero_stage,
            "precision": self.precision,
            "micro_batch": self.micro_batch,
            "accumulation": self.accumulation,
            "recompute": self.recompute,
            "offload": self.offload,
            "ds_config": self.ds_config,
            "predicted": self.predicted,
        }

    def unlike_config(self) -> list[str]:
        """Where ds_config, which is what runs, says something else than the plan: a line each."""
        config = read_config(self.ds_config, "ds_config")
        recompute = "recompute" in (self.ds_config.get("dsplan") or {})
        pairs = {
            "zero_stage": (self.zero_stage, config.zero_stage, "zero_optimization" in self.ds_config),
            "precision": (self.precision, config.precision, bool({"fp16", "bf16", "bfloat16"} & set(self.ds_config))),
            "micro_batch": (self.micro_batch, config.micro_batch, isinstance(config.micro_batch, int)),
            "accumulation": (self.accumulation, config.accumulation, isinstance(config.accumulation, int)),
            "recompute": (self.recompute, config.recompute, recompute),
            "offload": (
                self.offload,
                offloading(self.ds_config, config.zero_stage).what if self.engine == "native" else config.offload,
                "zero_optimization" in self.ds_config,
            ),
        }
        return [
            f"{name} is {mine}, but ds_config says {theirs}"
            for name, (mine, theirs, said) in pairs.items()
            if said and mine != theirs
        ]

    @staticmethod
    def from_json(value: dict[str, Any]) -> PlanFile:
        """ValueError with every reason, each naming the key, where the value is no plan (plan.schema.json)."""
        wrong = schema_errors("plan", value)
        if wrong:
            raise ValueError("; ".join(wrong))
        names = [field.name for field in fields(PlanFile) if field.name != "layout"]
        return PlanFile(layout=Layout(**value["layout"]), **{name: value[name] for name in names})
