"""The result of `dsplan estimate`: the model, the cluster, and one row per candidate. Field names are the JSON's."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from dsplan.schemas.answers import Explanation, LengthsAnswer, Reach, plan_key
from dsplan.schemas.cluster import Cluster
from dsplan.schemas.ledger import Ledger, Level
from dsplan.schemas.plan import Engine, Plan

Verdict = Literal["fits", "tight", "oom", "host_oom", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the report's head says of the model."""

    source: str
    params: int
    trainable_params: int
    forward_flops: float | None
    flops_source: str | None
    backward_flops: float | None = None
    recompute_flops: float | None = None
    shapes_sha256: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on the fullest rank at its peak; the categories add up to allocated_bytes. None: does not apply or not known."""

    params_bytes: int | None
    grads_bytes: int | None
    optimizer_bytes: int | None
    activations_bytes: int | None
    gathered_params_bytes: int | None
    buckets_bytes: int | None
    temporary_bytes: int | None
    allocated_bytes: int | None
    reserved_bytes: int | None
    device_bytes: int | None
    device_bytes_low: int | None
    device_bytes_high: int | None
    host_bytes: int | None
    """Per node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one optimizer step. All None where the GPU is of unknown kind or there is no sample batch."""

    step_seconds: float | None = None
    compute_seconds: float | None = None
    exposed_communication_seconds: float | None = None
    bubble_seconds: float | None = None
    samples_per_second: float | None = None
    tokens_per_second_per_gpu: float | None = None
    model_flops_per_second_per_gpu: float | None = None
    mfu: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One candidate with its numbers. `ledger` explains memory; None where only state bytes are known."""

    plan: Plan
    level: Level
    memory: Memory
    time: StepTime
    verdict: Verdict
    runnable: bool
    ledger: Ledger | None = None
    formulas: tuple[str, ...] = ()

    def to_json(self, *, formulas: bool = False) -> dict[str, Any]:
        """The contract's row. formulas: with what is held at the fullest moment of each phase, item by item."""
        plan = self.plan
        return {
            "engine": plan.engine,
            "level": self.level,
            "zero_stage": plan.zero_stage,
            "precision": plan.precision,
            "dp": plan.layout.dp,
            "dp_replicate": plan.layout.dp_replicate,
            "tp": plan.layout.tp,
            "pp": plan.layout.pp,
            "sp": plan.layout.sp,
            "micro_batch": plan.micro_batch,
            "accumulation": plan.accumulation,
            "global_batch": plan.global_batch,
            "seq_len": plan.seq_len,
            "recompute": plan.recompute,
            "offload": plan.offload,
            "optimizer": plan.optimizer.label,
            "memory": asdict(self.memory),
            "time": asdict(self.time),
            "verdict": self.verdict,
            "runnable": self.runnable,
            **(_moments(self.ledger) if formulas else {}),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """What the ranks of one pipeline stage of a plan hold, all alike."""

    plan: Plan
    pp_stage: int
    ranks: int
    """How many there are: dp x tp x sp."""
    phase: str
    where: str
    memory: Memory
    verdict: Verdict
    fullest: bool
    ledger: Ledger | None = None

    def to_json(self, *, formulas: bool = False) -> dict[str, Any]:
        return {
            "row": plan_key(self.plan),
            "pp_stage": self.pp_stage,
            "ranks": self.ranks,
            "phase": self.phase,
            "where": self.where,
            "memory": asdict(self.memory),
            "verdict": self.verdict,
            "fullest": self.fullest,
            **(_moments(self.ledger) if formulas else {}),
        }


def _moments(book: Ledger | None) -> dict[str, Any]:
    """Of each phase what is held at its fullest moment; the bytes of the items add up."""
    if book is None:
        return {"moments": []}
    return {
        "moments": [
            {
                "phase": moment.phase,
                "where": moment.where,
                "allocated_bytes": moment.allocated_bytes,
                "items": [asdict(item) for item in moment.items],
            }
            for moment in book.moments
        ]
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The whole report. `own` is the index of the row that is the user's own configuration, if any."""

    model: ModelFacts
    cluster: Cluster
    engine: Engine
    engine_version: str
    rows: tuple[Row, ...]
    skipped: dict[str, int] = field(default_factory=dict)
    """Reason -> number of rows left out."""
    own: int | None = None
    origins: tuple[tuple[str, str, str], ...] = ()
    """(what, value, where it came from: flag, --args, --config, default, script)."""
    notes: tuple[str, ...] = ()
    """What the reader should know: one sentence each."""
    answers: tuple[Reach, ...] = ()
    """To --max and --min: of the user's own row, else of each row shown."""
    lengths: tuple[LengthsAnswer, ...] = ()
    per_rank: tuple[StageRow, ...] = ()
    """Of each row shown, stage by stage."""
    explain: tuple[Explanation, ...] = ()
    """By engine, of the user's own row, else of the first that is shown."""

    def to_json(self, *, formulas: bool = False) -> dict[str, Any]:
        model = asdict(self.model)
        more: dict[str, Any] = {}
        if self.answers:
            more["answers"] = [answer.to_json() for answer in self.answers]
        if self.lengths:
            more["lengths"] = [answer.to_json() for answer in self.lengths]
        if self.per_rank:
            more["per_rank"] = [stage.to_json(formulas=formulas) for stage in self.per_rank]
        if self.explain:
            more["explain"] = [why.to_json() for why in self.explain]
        return {
            "version": 1,
            "model": {key: value for key, value in model.items() if key not in ("shapes_sha256", "notes")},
            "cluster": self.cluster.to_json(),
            "rows": [row.to_json(formulas=formulas) for row in self.rows],
            "skipped": [{"reason": reason, "rows": rows} for reason, rows in self.skipped.items()],
            **more,
        }
