"""One plan -> one row of the report: its trace, its ledger, its time, its verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dsplan.planner.memory import device, ledger, ledgers
from dsplan.planner.memory.requests import recorded
from dsplan.planner.models.load import Subject
from dsplan.planner.timing import step_time
from dsplan.planner.tracing.tracer import trace
from dsplan.schemas import native_support
from dsplan.schemas.cluster import Cluster
from dsplan.schemas.estimate import Memory, Row, StageRow, StepTime
from dsplan.schemas.ledger import STEP_PHASES
from dsplan.schemas.plan import Plan
from dsplan.schemas.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Where plans of one subject are evaluated."""

    subject: Subject
    cluster: Cluster
    own_seq_len: int | None
    """What the subject feeds where nobody names a length."""

    def traced(self, plan: Plan) -> Trace:
        """The trace that the plan needs (kept by the tracer, so that asking again costs nothing)."""
        return trace(
            self.subject,
            precision=plan.precision,
            recompute=plan.recompute,
            micro_batch=plan.micro_batch,
            seq_len=None if plan.seq_len == self.own_seq_len else plan.seq_len,
            count_flops=False,
        )

    def row(self, plan: Plan, cluster: Cluster | None = None) -> Row:
        """The plan's row at level formula; its time may be unknown. Problem where the model takes no such batch."""
        return estimate_row(self.traced(plan), plan, cluster or self.cluster)


def estimate_row(traced: Trace, plan: Plan, cluster: Cluster) -> Row:
    """One row at level formula. Without a sample batch only the state bytes are filled in."""
    book = ledger(traced, plan)
    if not traced.segments:
        state = {category: 0 for category in ("params", "grads", "optimizer")}
        for moment in book.moments:
            for category in state:
                state[category] = max(state[category], moment.category_bytes(category))  # type: ignore[arg-type]
        memory = Memory(
            params_bytes=state["params"],
            grads_bytes=state["grads"],
            optimizer_bytes=state["optimizer"],
            **dict.fromkeys(_REST),
            host_bytes=book.host_bytes * cluster.gpus_per_node,
        )
        return Row(
            plan=plan,
            level="formula",
            memory=memory,
            time=StepTime(),
            verdict="unknown",
            runnable=runnable(plan),
            ledger=book,
        )
    memory, verdict = device.device_memory(book, plan, cluster, traced)
    return Row(
        plan=plan,
        level=book.level,
        memory=memory,
        time=step_time(traced, plan, cluster),
        verdict=verdict,
        runnable=runnable(plan),
        ledger=book,
    )


def stage_rows(traced: Trace, plan: Plan, cluster: Cluster) -> tuple[StageRow, ...]:
    """Every pipeline stage of the plan at level formula, in order; all ranks of a stage hold the same. Empty where nothing is traced."""
    if not traced.segments:
        return ()
    books = ledgers(traced, plan)
    fullest = max(range(len(books)), key=lambda stage: books[stage].allocated_bytes)
    found = []
    for stage, book in enumerate(books):
        memory, verdict = device.device_memory(book, plan, cluster, traced)
        found.append(
            StageRow(
                plan=plan,
                pp_stage=stage,
                ranks=plan.layout.ranks // plan.layout.pp,
                phase=book.peak.phase,
                where=book.peak.where,
                memory=memory,
                verdict=verdict,
                fullest=stage == fullest,
                ledger=book,
            )
        )
    return tuple(found)


def stages_of(row: Row, bench: Bench) -> tuple[StageRow, ...]:
    """The row's pipeline stages. A rehearsed row has one, and is it."""
    if row.level != "rehearsal" or row.ledger is None:
        return stage_rows(bench.traced(row.plan), row.plan, bench.cluster)
    stage = StageRow(
        plan=row.plan,
        pp_stage=0,
        ranks=row.plan.layout.ranks,
        phase=row.ledger.peak.phase,
        where=row.ledger.peak.where,
        memory=row.memory,
        verdict=row.verdict,
        fullest=True,
        ledger=row.ledger,
    )
    return (stage,)


def rehearsed_row(subject: Subject, row: Row, cluster: Cluster, config: Mapping[str, Any] | None = None) -> Row:
    """The same row with the bytes that the engine itself allocates on fake tensors. config: the user's own, for DeepSpeed."""
    if row.plan.engine == "deepspeed":
        from dsplan.planner.rehearsing.deepspeed import rehearse

        rehearsal = rehearse(subject, row.plan, config)
    else:
        from dsplan.planner.rehearsing.native import rehearsal as rehearsal_of

        rehearsal = rehearsal_of(subject, row.plan)
    book = rehearsal.ledger
    if row.ledger is not None:  # a rehearsal sees one step: neither loading nor saving
        told = row.ledger
        outside = tuple(moment for moment in told.moments if moment.phase not in STEP_PHASES)
        book = replace(
            book,
            moments=(*book.moments, *outside),
            load_host_bytes=told.load_host_bytes,
            save_host_bytes=told.save_host_bytes,
        )
    requests = recorded(rehearsal.events, rehearsal.resident)
    memory, verdict = device.device_memory(book, row.plan, cluster, requests=requests)
    return replace(row, level=book.level, memory=memory, verdict=verdict, ledger=book)


def runnable(plan: Plan) -> bool:
    """Whether the engine carries the plan out today: for native, by the same table that initialize and lint read."""
    layout = plan.layout
    if layout.tp > 1 or layout.pp > 1 or layout.sp > 1 or layout.dp_replicate > 1:
        return False
    if plan.engine == "deepspeed":
        return True
    zero: dict[str, Any] = {"stage": plan.zero_stage}
    if plan.offload != "none":
        zero[f"offload_{plan.offload}"] = {"device": "cpu"}
    config = {
        "zero_optimization": zero,
        "optimizer": {"type": plan.optimizer.name if plan.optimizer.state_dtype == "fp32" else plan.optimizer.label},
        "dsplan": {"recompute": plan.recompute},
    }
    return all(severity != "error" for _, severity, _ in native_support.reasons(config))


_REST = (
    "activations_bytes",
    "gathered_params_bytes",
    "buckets_bytes",
    "temporary_bytes",
    "allocated_bytes",
    "reserved_bytes",
    "device_bytes",
    "device_bytes_low",
    "device_bytes_high",
)
