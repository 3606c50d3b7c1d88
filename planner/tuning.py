"""`tune`: every runnable combination that trains the same model, and the best of those that fit."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dsplan.planner import estimating
from dsplan.planner.candidates import candidates
from dsplan.planner.cautions import untimed
from dsplan.planner.models.adapting import AS_IT_IS, Adapting
from dsplan.planner.models.load import TRACE_TIMEOUT_SECONDS, Subject, load_subject
from dsplan.planner.rows import estimate_row, rehearsed_row
from dsplan.planner.settings import Flags, Settings
from dsplan.planner.terminal import Told, quiet
from dsplan.planner.tuned_files import DEFAULT_LEARNING_RATE, plan_file
from dsplan.schemas.choices import RECOMPUTES, optimizer_named
from dsplan.schemas.cluster import Cluster, parse_cluster
from dsplan.schemas.companion import Companion, read_companion
from dsplan.schemas.config import DsConfig
from dsplan.schemas.estimate import Row
from dsplan.schemas.plan import Plan
from dsplan.schemas.problem import Problem
from dsplan.schemas.tuned import Tuned

FREE_KEYS = ("global_batch", "precision")
LARGEST_MICRO_BATCH = 1024
"""Where the search over micro_batch stops when no global batch bounds it."""


def tune(
    model: str,
    *,
    cluster: Cluster | str,
    config: str | Mapping[str, Any] | None = None,
    args: str | None = None,
    global_batch: int | None = None,
    free: Sequence[str] = (),
    objective: str = "throughput",
    trials: int = 0,
    flags: Flags | None = None,
    sets: Mapping[str, str] | None = None,
    script_args: Sequence[str] = (),
    adapting: Adapting = AS_IT_IS,
    trace_timeout_seconds: float = TRACE_TIMEOUT_SECONDS,
    reserve_bytes: int = 0,
    progress: Told = quiet,
) -> Tuned:
    """The fastest (or smallest) combination of zero_stage, micro_batch, accumulation and recompute that fits.

    Global batch, optimizer, precision, clipping and schedule stay those of the config unless named in `free` or in flags,
    which also narrow down what is tried. flags: no more than one engine, and no split; native unless said.
    trials: the K best are rehearsed before the choice. Problem where the cluster's kind is unknown and speed is asked for.
    """
    cluster = (parse_cluster(cluster) if isinstance(cluster, str) else cluster).reserving(reserve_bytes)
    if "optimizer" in free:
        raise Problem(
            "--free optimizer: memory and speed alone cannot tell which optimizer trains as well; name it with --args or in "
            "the config's optimizer block"
        )
    unknown = [key for key in free if key not in FREE_KEYS]
    if unknown:
        raise Problem(f"--free {','.join(unknown)} is not known; choose from {', '.join(FREE_KEYS)}")
    if cluster.gpu is None and objective == "throughput":
        raise Problem(
            f"--cluster {cluster.text}: the GPUs are of unknown kind, so nothing can be said of speed or fit; name the kind, "
            f"as in {cluster.ranks}xA100-80GB, or choose --objective memory"
        )
    ds_config = estimating.read_config_argument(config)
    companion = read_companion(args) if args else None
    flags = flags or Flags()
    engine = flags.engine or "native"
    wide = replace(
        flags,
        engine=engine,
        zero=flags.zero or (0, 1, 2, 3),
        precision=flags.precision or (("bf16", "fp16", "fp32") if "precision" in free else None),
        tp=None if ds_config else (1,),
        pp=None if ds_config else (1,),
    )
    progress(f"loading {model}")
    subject = load_subject(
        model,
        sets=sets or {},
        seq_len=flags.seq_len or (companion.seq_len if companion else None),
        script_args=script_args,
        adapting=adapting,
        trace_timeout_seconds=trace_timeout_seconds,
    )
    settings = estimating.settle_for(subject, wide, cluster, companion, ds_config, needs_batch=False)
    _keeps_the_optimizer(flags, ds_config.raw if ds_config else subject.config or {}, subject)
    wanted, origin = _global_batch(settings, subject, cluster, global_batch, free)
    rows, skipped = _rows(subject, settings, cluster, wanted, flags.recompute, progress)
    ranked = sorted(rows, key=lambda row: _rank(row, objective))
    refused: list[str] = []
    for index in range(min(trials, len(ranked))):
        progress("rehearsing candidates", index, trials)
        try:
            ranked[index] = rehearsed_row(
                subject, ranked[index], cluster, ds_config.raw if ds_config else subject.config
            )
        except Problem as problem:
            refused.append(f"not rehearsed: {problem}")
    ranked.sort(key=lambda row: _rank(row, objective))
    best = ranked[0] if ranked[0].verdict in ("fits", "tight", "unknown") else None
    plan = ranked[0].plan
    traced = estimating.trace_for(
        subject, replace(settings, recompute=plan.recompute), plan.precision, plan.micro_batch
    )
    facts = estimating.model_facts(subject, traced)
    base = ds_config.raw if ds_config else subject.config or {}
    trained = _precision_before(subject, flags, cluster, companion, ds_config)
    same, why = _trains_the_same(subject, settings, best, wanted, origin, trained)
    notes = estimating.config_notes(config, ds_config, cluster, engine)
    notes += settings.notes
    notes += list(estimating.notes_of(subject, traced, [row.plan for row in ranked[:1]]))
    notes += untimed(ranked)
    if best and not base.get("optimizer") and subject.optimizer is None:
        notes.append(
            f"no configuration names an optimizer: ds_config.json takes {settings.optimizer.name} with lr "
            f"{DEFAULT_LEARNING_RATE:g}; set yours"
            if settings.optimizer.state_dtype == "fp32"
            else f"DeepSpeed's JSON has no name for {settings.optimizer.label}: ds_config.json names no optimizer, the script makes it"
        )
    return Tuned(
        model=facts,
        cluster=cluster,
        engine=settings.engine,
        engine_version=estimating.engine_version(settings.engine),
        plan=plan_file(best, facts, cluster, base, subject) if best else None,
        rows=tuple(ranked),
        skipped=skipped,
        same_model=same,
        same_model_why=why,
        notes=tuple(dict.fromkeys((*notes, *refused))),
    )


def _global_batch(
    settings: Settings, subject: Subject, cluster: Cluster, asked: int | None, free: Sequence[str]
) -> tuple[int | None, str]:
    """(the global batch to keep, where it is from); None: free."""
    if asked is not None:
        return asked, "--global-batch"
    if "global_batch" in free:
        return None, "free"
    if settings.global_batch is not None:
        return settings.global_batch, "the configuration"
    if settings.micro_batch is not None:
        return settings.micro_batch * (settings.accumulation or 1) * cluster.ranks, "the configuration"
    return None, "free, since nothing names one"


def _rows(
    subject: Subject,
    settings: Settings,
    cluster: Cluster,
    wanted: int | None,
    recompute_asked: str | None,
    progress: Told,
) -> tuple[list[Row], dict[str, int]]:
    """Every runnable row, and what was left out. Of a plan's micro-batches none is tried above the first that does not fit."""
    templates, skipped = _templates(subject, settings, cluster, wanted)
    policies = (recompute_asked,) if recompute_asked else RECOMPUTES
    recomputes = policies if settings.engine == "native" else (settings.recompute,)
    rows: list[Row] = []
    failed: Problem | None = None
    for recompute, (precision, dp) in itertools.product(
        recomputes, dict.fromkeys((plan.precision, plan.layout.dp) for plan in templates)
    ):
        wanted_settings = replace(settings, recompute=recompute)
        still = [plan for plan in templates if (plan.precision, plan.layout.dp) == (precision, dp)]
        too_large = 0
        for micro_batch, accumulation in _batches(wanted, dp, subject.micro_batch):
            if too_large:
                skipped["a smaller micro_batch does not fit"] += too_large
            if not still:
                continue
            progress(f"estimating {precision}, recompute {recompute}, micro_batch {micro_batch}")
            try:
                traced = estimating.trace_for(subject, wanted_settings, precision, micro_batch)
            except Problem as problem:  # some models take no batch of one, for example
                failed = failed or problem
                skipped[f"micro_batch {micro_batch}: {problem}"] += len(still)
                continue
            if not traced.segments:
                raise Problem(f"{subject.source}: tune needs a sample batch; {traced.notes[0] if traced.notes else ''}")
            found = [
                estimate_row(
                    traced,
                    replace(
                        plan,
                        micro_batch=micro_batch,
                        accumulation=accumulation,
                        seq_len=traced.seq_len,
                        recompute=recompute,
                    ),
                    cluster,
                )
                for plan in still
            ]
            for row in found:
                if not row.runnable:
                    skipped[
                        f"engine {settings.engine} does not carry it out: {_what_is_not_carried_out(row.plan)}"
                    ] += 1
            rows += [row for row in found if row.runnable]
            too_large += sum(row.runnable and row.verdict == "oom" for row in found)
            still = [plan for plan, row in zip(still, found, strict=True) if row.runnable and row.verdict != "oom"]
    if not rows:
        raise failed or Problem(f"nothing can be run: {'; '.join(skipped)}")
    return rows, dict(skipped)


def _templates(
    subject: Subject, settings: Settings, cluster: Cluster, wanted: int | None
) -> tuple[list[Plan], Counter[str]]:
    """The plans to try, of which micro_batch, accumulation and recompute are still open, and what was left out."""
    open_batch = replace(settings, global_batch=None, micro_batch=1, accumulation=1)
    limit, num_blocks, no_rule = 1, 1, ""
    if settings.tp != (1,) or settings.pp != (1,):
        first = estimating.trace_for(subject, settings, settings.precision[0])
        limit, num_blocks, no_rule = first.tp_limit, len(first.blocks), first.no_tp_rule
    found = candidates(open_batch, cluster, tp_limit=limit, num_blocks=num_blocks, no_tp_rule=no_rule)
    dps = {plan.layout.dp for plan in found.plans}
    if not any(_batches(wanted, dp, subject.micro_batch) for dp in dps):
        raise Problem(
            f"global batch {wanted} does not divide over {max(dps)} GPUs"
            + (f" at the {subject.micro_batch} samples that the script feeds" if subject.micro_batch else "")
            + "; choose another with --global-batch"
        )
    return list(found.plans), Counter(found.skipped)


def _what_is_not_carried_out(plan: Plan) -> str:
    layout = plan.layout
    split = layout.tp * layout.pp * layout.sp * layout.dp_replicate > 1
    return (
        str(layout)
        if split
        else f"optimizer {plan.optimizer.label}, offload {plan.offload}, recompute {plan.recompute}"
    )


def _batches(wanted: int | None, dp: int, fed: int | None) -> list[tuple[int, int]]:
    """(micro_batch, accumulation), small to large: those that give the global batch, or powers of two."""
    if fed is not None:  # a script's data are never cut
        if wanted is None or wanted % (fed * dp) == 0:
            return [(fed, 1 if wanted is None else wanted // (fed * dp))]
        return []
    if wanted is None:
        return [(1 << exponent, 1) for exponent in range(LARGEST_MICRO_BATCH.bit_length())]
    if wanted % dp:
        return []
    per_rank = wanted // dp
    return [(n, per_rank // n) for n in range(1, min(per_rank, LARGEST_MICRO_BATCH) + 1) if per_rank % n == 0]


def _rank(row: Row, objective: str) -> tuple[float, ...]:
    """Smaller is better: what fits, then the objective (speeds within 1 % are equal), then what is simpler.

    Simpler: a lower zero_stage, no recompute, fewer micro-batches; then less memory.
    """
    verdict = {"fits": 0, "unknown": 0, "tight": 1, "host_oom": 2, "oom": 3}[row.verdict]
    memory = float(row.memory.device_bytes or row.memory.allocated_bytes or 0)
    rate = row.time.samples_per_second
    speed = -round(math.log(rate) / math.log(1.01)) if rate else 0
    simple = (row.plan.zero_stage, 0 if row.plan.recompute == "none" else 1, row.plan.accumulation)
    return (verdict, memory, speed, *simple) if objective == "memory" else (verdict, speed, *simple, memory)


def _batch_statistics(subject: Subject) -> bool:
    """Whether the model normalises over its micro-batch, so that another micro_batch trains another model."""
    from torch.nn.modules.batchnorm import _BatchNorm

    module = getattr(subject, "module", None)
    return module is not None and any(isinstance(part, _BatchNorm) for part in module.modules())


def _precision_before(
    subject: Subject, flags: Flags, cluster: Cluster, companion: Companion | None, config: DsConfig | None
) -> str | None:
    """What configuration and arguments train in where no flag says otherwise; None where they do not say."""
    if config is None and not subject.config and companion is None:
        return None
    try:
        told = estimating.settle_for(subject, Flags(engine=flags.engine), cluster, companion, config, needs_batch=False)
    except Problem:  # an "auto" that only the flag fills
        return None
    return told.own_precision


def _keeps_the_optimizer(flags: Flags, base: Mapping[str, Any], subject: Subject) -> None:
    """Problem where --optimizer is not what the configuration or the script trains with, which tune does not change."""
    if flags.optimizer is None:
        return
    if subject.optimizer is not None:
        raise Problem(
            f"--optimizer {flags.optimizer}: {subject.source} makes its own ({subject.optimizer.label}), which tune does not change"
        )
    block = base.get("optimizer")
    said = block.get("type") if isinstance(block, Mapping) else None
    if isinstance(said, str) and optimizer_named(said) != optimizer_named(flags.optimizer):
        raise Problem(
            f"--optimizer {flags.optimizer}: the configuration's optimizer.type is {said}, which tune does not change; change it there"
        )


def _trains_the_same(
    subject: Subject,
    settings: Settings,
    best: Row | None,
    wanted: int | None,
    origin: str,
    precision_before: str | None,
) -> tuple[bool, str]:
    if best is None:
        return False, "nothing fits"
    plan = best.plan
    if settings.micro_batch not in (None, plan.micro_batch) and _batch_statistics(subject):
        return False, (
            f"micro_batch is {plan.micro_batch}, not {settings.micro_batch}, and the model has batch normalisation, "
            "whose statistics are over a micro-batch"
        )
    if precision_before and plan.precision != precision_before:
        return False, f"precision is {plan.precision}, the configuration's {precision_before}"
    if wanted is None:
        return True, f"global batch {plan.global_batch} ({origin}); precision {plan.precision}"
    return (
        True,
        f"global batch {plan.global_batch} (from {origin}), precision {plan.precision}, optimizer, clipping and schedule stay",
    )
