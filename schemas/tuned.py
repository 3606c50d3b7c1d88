"""The result of `dsplan tune`."""

from __future__ import annotations

from dataclasses import dataclass

from dsplan.schemas.cluster import Cluster
from dsplan.schemas.estimate import ModelFacts, Row
from dsplan.schemas.plan import Engine, PlanFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The chosen plan (None where nothing fits), all rows tried (best first), and whether it trains the same model."""

    model: ModelFacts
    cluster: Cluster
    engine: Engine
    engine_version: str
    plan: PlanFile | None
    rows: tuple[Row, ...]
    skipped: dict[str, int]
    same_model: bool
    same_model_why: str
    notes: tuple[str, ...]
