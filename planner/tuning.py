"""`tune`: every runnable combination that trains the same model, and the best of those that fit."""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsplan.planner import estimating
from dsplan.planner.models.adapting import AS_IT_IS, Adapting
from dsplan.planner.models.load import TRACE_TIMEOUT_SECONDS, Subject, load_subject
from dsplan.planner.rows import estimate_row, rehearsed_row
from dsplan.planner.settings import Flags, Settings
from dsplan.planner.terminal import Told, quiet
from dsplan.schemas.cluster import Cluster, parse_cluster
from dsplan.schemas.companion import read_companion
from dsplan.schemas.estimate import ModelFacts, Row
from dsplan.schemas.layout import Layout
from dsplan.schemas.plan import Plan, PlanFile
from dsplan.schemas.problem import Problem
from dsplan.schemas.tuned import Tuned

FREE_KEYS = ("global_batch", "precision")
OPTIMIZER_TYPES = {
    "adam": "Adam",
    "adamw": "AdamW",
    "adagrad": "Adagrad",
    "lion": "Lion",
    "sgd": "SGD",
    "lamb": "Lamb",
    "muon": "Muon",
    "adafactor": "Adafactor",
    "rmsprop": "RMSprop",
    "adamax": "Adamax",
    "nadam": "NAdam",
    "radam": "RAdam",
    "adadelta": "Adadelta",
}
"""As DeepSpeed writes them. Source: deepspeed/runtime/engine.py, _configure_basic_optimizer; torch.optim."""
LARGEST_MICRO_BATCH = 1024
"""Where the search over micro_batch stops when no global batch bounds it."""
DEFAULT_LEARNING_RATE = 1e-3
"""Source: torch.optim.AdamW and deepspeed/ops/adam/fused_adam.py, default of lr."""
DEFAULT_MOMENTUM = 0.9
"""For SGD that the arguments say keeps a momentum, without its size. Source: torchvision's reference training scripts."""


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
    engine: str = "native",
    seq_len: int | None = None,
    sets: Mapping[str, str] | None = None,
    script_args: Sequence[str] = (),
    adapting: Adapting = AS_IT_IS,
    trace_timeout_seconds: float = TRACE_TIMEOUT_SECONDS,
    reserve_bytes: int = 0,
    progress: Told = quiet,
) -> Tuned:
    """The fastest (or smallest) combination of zero_stage, micro_batch, accumulation and recompute that fits.

    Global batch, optimizer, precision, clipping and schedule stay those of the config unless named in `free`.
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
    flags = Flags(zero=(0, 1, 2, 3), tp=(1,), pp=(1,), seq_len=seq_len, engine=engine)  # type: ignore[arg-type]
    if "precision" in free:
        flags = replace(flags, precision=("bf16", "fp16", "fp32"))
    progress(f"loading {model}")
    subject = load_subject(
        model,
        sets=sets or {},
        seq_len=seq_len,
        script_args=script_args,
        adapting=adapting,
        trace_timeout_seconds=trace_timeout_seconds,
    )
    settings = estimating.settle_for(subject, flags, cluster, companion, ds_config, needs_batch=False)
    wanted, origin = _global_batch(settings, subject, cluster, global_batch, free)
    rows, skipped = _rows(subject, settings, cluster, wanted, progress)
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
    same, why = _trains_the_same(subject, settings, best, wanted, origin)
    notes = estimating.config_notes(config, ds_config, cluster, engine)
    notes += list(estimating.notes_of(subject, traced, [row.plan for row in ranked[:1]]))
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
        plan=_plan_file(best, facts, cluster, base, subject) if best else None,
        rows=tuple(ranked),
        skipped=skipped,
        same_model=same,
        same_model_why=why,
        notes=tuple(dict.fromkeys((*notes, *refused))),
    )


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
    if with_optimizer and not config.get("optimizer") and plan.optimizer.state_dtype == "fp32":
        params: dict[str, Any] = {"lr": DEFAULT_LEARNING_RATE}
        if plan.optimizer.momentum:
            params["momentum"] = DEFAULT_MOMENTUM
        config["optimizer"] = {"type": OPTIMIZER_TYPES[plan.optimizer.name], "params": params}
    own = config.get("dsplan")
    config["dsplan"] = {**(own if isinstance(own, dict) else {}), "recompute": plan.recompute}
    return config


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
    subject: Subject, settings: Settings, cluster: Cluster, wanted: int | None, progress: Told
) -> tuple[list[Row], dict[str, int]]:
    rows: list[Row] = []
    skipped: Counter[str] = Counter()
    failed: Problem | None = None
    dp = cluster.ranks
    recomputes = ("none", "full") if settings.engine == "native" else (settings.recompute,)
    batches = _batches(wanted, dp, subject.micro_batch)
    if not batches:
        raise Problem(
            f"global batch {wanted} does not divide over {dp} GPUs"
            + (f" at the {subject.micro_batch} samples that the script feeds" if subject.micro_batch else "")
            + "; choose another with --global-batch"
        )
    for precision in settings.precision:
        for recompute in recomputes:
            wanted_settings = replace(settings, recompute=recompute)
            open_stages = set(settings.zero)
            for micro_batch, accumulation in batches:
                if not open_stages:
                    skipped["a smaller micro_batch does not fit"] += len(settings.zero)
                    continue
                progress(f"estimating {precision}, recompute {recompute}, micro_batch {micro_batch}")
                try:
                    traced = estimating.trace_for(subject, wanted_settings, precision, micro_batch)
                except Problem as problem:  # some models take no batch of one, for example
                    failed = failed or problem
                    skipped[f"micro_batch {micro_batch}: {problem}"] += len(settings.zero)
                    continue
                if not traced.segments:
                    raise Problem(
                        f"{subject.source}: tune needs a sample batch; {traced.notes[0] if traced.notes else ''}"
                    )
                for zero_stage in settings.zero:
                    if zero_stage not in open_stages:
                        skipped["a smaller micro_batch does not fit"] += 1
                        continue
                    plan = Plan(
                        engine=settings.engine,
                        layout=Layout(dp_shard=dp),
                        zero_stage=zero_stage,
                        precision=precision,
                        micro_batch=micro_batch,
                        accumulation=accumulation,
                        seq_len=traced.seq_len,
                        recompute=recompute,  # type: ignore[arg-type]
                        offload=settings.offload,  # type: ignore[arg-type]
                        optimizer=settings.optimizer,
                        knobs=settings.knobs,
                    )
                    row = estimate_row(traced, plan, cluster)
                    if not row.runnable:
                        skipped[f"engine {settings.engine} does not carry it out"] += 1
                        continue
                    rows.append(row)
                    if row.verdict == "oom":
                        open_stages.discard(zero_stage)
    if not rows:
        raise failed or Problem(f"nothing can be run: {'; '.join(skipped)}")
    return rows, dict(skipped)


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


def _trains_the_same(
    subject: Subject, settings: Settings, best: Row | None, wanted: int | None, origin: str
) -> tuple[bool, str]:
    if best is None:
        return False, "nothing fits"
    plan = best.plan
    if settings.micro_batch not in (None, plan.micro_batch) and _batch_statistics(subject):
        return False, (
            f"micro_batch is {plan.micro_batch}, not {settings.micro_batch}, and the model has batch normalisation, "
            "whose statistics are over a micro-batch"
        )
    if settings.own_precision and plan.precision != settings.own_precision and len(settings.precision) > 1:
        return False, f"precision is {plan.precision}, the configuration's {settings.own_precision}"
    if wanted is None:
        return True, f"global batch {plan.global_batch} ({origin}); precision {plan.precision}"
    return (
        True,
        f"global batch {plan.global_batch} (from {origin}), precision {plan.precision}, optimizer, clipping and schedule stay",
    )


def _plan_file(row: Row, facts: ModelFacts, cluster: Cluster, base: Mapping[str, Any], subject: Subject) -> PlanFile:
    plan = row.plan
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
        ds_config=tuned_config(base, plan, with_optimizer=subject.optimizer is None),
        predicted=row.to_json(),
    )
