"""Seconds of one optimizer step: a roofline over the trace, the pipeline's bubble, and communication that nothing hides."""

from __future__ import annotations

from dsplan.schemas.cluster import Cluster
from dsplan.schemas.estimate import StepTime
from dsplan.schemas.plan import Plan
from dsplan.schemas.trace import Trace


def step_time(trace: Trace, plan: Plan, cluster: Cluster) -> StepTime:
    """Seconds and rates of one optimizer step. All None where the GPU or its rate is unknown, or nothing was traced."""
    return StepTime()
