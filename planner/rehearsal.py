"""The real runtime, run for a few steps on fake tensors in a fake process group: level "rehearsal"."""

from __future__ import annotations

from typing import Any

from dsplan.schemas.ledger import Ledger
from dsplan.schemas.plan import Plan
from dsplan.schemas.problem import Problem


def rehearse(subject: Any, plan: Plan) -> Ledger:
    """The ledger of rank 0 over one step of the plan's engine, rehearsed without weights, GPU or network."""
    raise Problem("rehearsal is not available yet; the formula stands")
