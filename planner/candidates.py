"""From settings to the list of plans: which combinations exist on this cluster and model, and why others do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from dsplan.planner.settings import Settings
from dsplan.schemas.batch import resolve_batch
from dsplan.schemas.cluster import Cluster
from dsplan.schemas.layout import Layout
from dsplan.schemas.plan import Engine, Plan
from dsplan.schemas.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The plans in table order, and what was left out: reason -> count."""

    plans: tuple[Plan, ...]
    skipped: dict[str, int]


def candidates(
    settings: Settings, cluster: Cluster, *, tp_limit: int, num_blocks: int, no_tp_rule: str = ""
) -> Candidates:
    """Every plan that the settings name and the model and cluster allow.

    tp_limit: what tp must divide (heads and split dims); no_tp_rule: why nothing is split; num_blocks: the most pipeline
    stages. Problem where a split that was asked for by name does not divide the GPUs, or where nothing is left.
    """
    for name, degrees in (("--tp", settings.tp), ("--pp", settings.pp)):
        for degree in degrees or ():
            if cluster.ranks % degree:
                raise Problem(
                    f"{name} {degree} does not divide the {cluster.ranks} GPUs of {cluster.text}; "
                    f"choose from {', '.join(map(str, _divisors(cluster.ranks)))}"
                )
    skipped: Counter[str] = Counter()
    plans: list[Plan] = []
    for zero_stage in settings.zero:
        for precision in settings.precision:
            for tp, pp in _splits(settings, cluster, tp_limit, num_blocks):
                reason = no_such_offload(settings.engine, settings.offload, zero_stage) or _refused(
                    zero_stage, tp, pp, cluster, tp_limit, num_blocks, no_tp_rule
                )
                reason = reason or _no_such_split(settings, cluster, tp, pp, num_blocks)
                if reason:
                    skipped[reason] += 1
                    continue
                replicate, sp = settings.dp_replicate, settings.sp
                layout = Layout(
                    dp_shard=cluster.ranks // (tp * pp * sp * replicate), dp_replicate=replicate, tp=tp, pp=pp, sp=sp
                )
                try:
                    micro_batch, accumulation = _batch(settings, layout.dp)
                except ValueError as error:
                    skipped[f"{settings.source}: {error}"] += 1
                    continue
                plans.append(
                    Plan(
                        engine=settings.engine,
                        layout=layout,
                        zero_stage=zero_stage,
                        precision=precision,
                        micro_batch=micro_batch,
                        accumulation=accumulation,
                        seq_len=settings.seq_len,
                        recompute=settings.recompute,  # type: ignore[arg-type]
                        offload=settings.offload,  # type: ignore[arg-type]
                        optimizer=settings.optimizer,
                        knobs=settings.knobs,
                        built=settings.built or (settings.built_at_3 if zero_stage == 3 else "host"),
                        schedule=settings.schedule,
                        sequence_parallel=settings.sequence_parallel and tp > 1,
                        virtual_stages=settings.virtual_stages,
                    )
                )
    if not plans:
        raise Problem(next(iter(skipped)) if len(skipped) == 1 else f"no combination is left: {'; '.join(skipped)}")
    return Candidates(plans=tuple(plans), skipped=dict(skipped))


def regrouped(plan: Plan, ranks: int, global_batch: int | None) -> Plan:
    """The same plan on another number of ranks, which tp, pp and dp_replicate divide: dp_shard grows, micro_batch stays.

    Accumulation gives way where that keeps `global_batch`; None, or one that is no whole number of micro-batches: it stays.
    """
    layout = plan.layout
    layout = replace(layout, dp_shard=ranks // (layout.tp * layout.pp * layout.sp * layout.dp_replicate))
    per_pass = plan.micro_batch * layout.dp
    whole = global_batch is not None and global_batch % per_pass == 0
    return replace(
        plan, layout=layout, accumulation=global_batch // per_pass if whole and global_batch else plan.accumulation
    )


def _splits(settings: Settings, cluster: Cluster, tp_limit: int, num_blocks: int) -> Iterator[tuple[int, int]]:
    tps = settings.tp or [n for n in _powers(cluster.gpus_per_node) if tp_limit % n == 0]
    pps = settings.pp or _powers(max(1, num_blocks))
    for tp in tps:
        for pp in pps:
            if settings.pp is not None or settings.tp is not None or cluster.ranks % (tp * pp) == 0:
                yield tp, pp


def _refused(
    zero_stage: int, tp: int, pp: int, cluster: Cluster, tp_limit: int, num_blocks: int, no_tp_rule: str
) -> str | None:
    if cluster.ranks % (tp * pp):
        return f"tp {tp} x pp {pp} does not divide the {cluster.ranks} GPUs"
    if tp > 1 and no_tp_rule:
        return f"tp {tp}: no rule was found by which to split this model: {no_tp_rule}"
    if tp > 1 and tp_limit % tp:
        return f"tp {tp} does not divide the model's heads and split dims (largest: {tp_limit})"
    if tp > cluster.gpus_per_node:
        return f"tp {tp} is larger than the {cluster.gpus_per_node} GPUs of a node"
    if pp > 1 and pp > num_blocks:
        return f"pp {pp} is larger than the number of blocks ({num_blocks})"
    if pp > 1 and zero_stage > 1:
        return "pp > 1 with zero 2 or 3: gradients stay whole over a pipeline's micro-batches"
    return None


def _no_such_split(settings: Settings, cluster: Cluster, tp: int, pp: int, num_blocks: int) -> str | None:
    if cluster.ranks % (tp * pp * settings.sp * settings.dp_replicate):
        degrees = ((tp, "tp"), (pp, "pp"), (settings.sp, "sp"), (settings.dp_replicate, "dp_replicate"))
        product = " x ".join(f"{name} {degree}" for degree, name in degrees if degree > 1)
        return f"{product} does not divide the {cluster.ranks} GPUs"
    chunks = pp * settings.virtual_stages
    if pp > 1 and chunks > num_blocks:
        return f"pp {pp} x {settings.virtual_stages} virtual stages are more than the {num_blocks} blocks"
    return None


def no_such_offload(engine: Engine, offload: str, zero_stage: int) -> str | None:
    """Why nothing is offloaded there. Source: deepspeed/runtime/engine.py: offload_param acts at stage 3 alone,
    offload_optimizer from stage 1 on; the native engine offloads the optimizer at every stage."""
    if offload == "param" and zero_stage != 3:
        return "offload param with a zero below 3: parameters are not sharded there"
    if offload == "optimizer" and zero_stage == 0 and engine == "deepspeed":
        return "offload optimizer with zero 0: DeepSpeed leaves the optimizer on the device there"
    return None


def _batch(settings: Settings, dp: int) -> tuple[int, int]:
    """(micro_batch, accumulation) of this dp; ValueError where the batch equation has no whole answer."""
    if settings.global_batch is None:
        return settings.micro_batch or 1, settings.accumulation or 1
    if settings.micro_batch is not None and settings.accumulation is not None:
        resolve_batch(settings.global_batch, settings.micro_batch, settings.accumulation, dp)
        return settings.micro_batch, settings.accumulation
    if settings.micro_batch is not None:
        batch = resolve_batch(settings.global_batch, settings.micro_batch, None, dp)
        return batch.micro_batch, batch.accumulation
    accumulation = settings.accumulation or 1
    if settings.global_batch % (accumulation * dp):
        raise ValueError(
            f"train_batch_size {settings.global_batch} / (accumulation {accumulation} x dp {dp}) is not whole; "
            f"choose a multiple of {accumulation * dp}, or another number of GPUs"
        )
    return settings.global_batch // (accumulation * dp), accumulation


def _powers(limit: int) -> list[int]:
    return [1 << exponent for exponent in range(limit.bit_length()) if 1 << exponent <= limit]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
