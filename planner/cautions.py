"""What an estimate does not say by its numbers: options without effect, values that give way, times that leave something out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dsplan.planner.settings import Flags, Settings
from dsplan.schemas.cluster import Cluster
from dsplan.schemas.companion import Companion
from dsplan.schemas.config import DsConfig
from dsplan.schemas.estimate import Row
from dsplan.schemas.plan import Plan
from dsplan.schemas.trace import Trace


def idle_flags(flags: Flags, plans: Sequence[Plan]) -> Iterator[str]:
    """What was asked for and changes nothing in any row, with what would give it an effect."""
    if flags.schedule is not None and all(plan.layout.pp == 1 for plan in plans):
        yield f"--schedule {flags.schedule} has no effect: no row has pipeline stages (--pp 2)"
    if flags.sequence_parallel and all(plan.layout.tp == 1 for plan in plans):
        yield "--sequence-parallel has no effect: no row is split by tensors (--tp 2)"
    if (flags.dp_replicate or 1) > 1 and all(plan.zero_stage == 0 for plan in plans):
        yield f"--dp-replicate {flags.dp_replicate} has no effect: at zero 0 every rank is a copy (--zero 1)"


def unkept_batch(
    flags: Flags, config: DsConfig | None, companion: Companion | None, plans: Sequence[Plan]
) -> Iterator[str]:
    """Where the batch that --args names, and no flag, makes another global batch than the configuration says."""
    said = config.train_batch_size if config else None
    if not config or not companion or not isinstance(said, int) or flags.micro_batch or flags.accumulation:
        return
    real = next((plan.global_batch for plan in plans if plan.global_batch != said), None)
    if real is not None and (companion.micro_batch or companion.accumulation):
        yield f"global batch {real} with --args {companion.source}, not the train_batch_size {said} of {config.source}"


def no_tp_rows(settings: Settings, traced: Trace, cluster: Cluster) -> Iterator[str]:
    """Why no row is split by tensors, where nobody said how to split."""
    if settings.tp is None and cluster.gpus_per_node > 1 and traced.no_tp_rule:
        yield f"no row with tp above 1: no rule was found by which to split this model: {traced.no_tp_rule}"


def untimed(rows: Sequence[Row]) -> Iterator[str]:
    """What the times that are shown leave out, so that nobody chooses by them."""
    if any(row.plan.offload != "none" and row.time.step_seconds is not None for row in rows):
        yield (
            "times leave offload out: step counts neither the traffic between GPU and host nor the optimizer on the CPU, so it "
            "is too short where something is offloaded, and tokens/s and MFU are too high; only bytes compare with other rows"
        )
