"""`estimate`: MODEL, configuration and cluster in; one row per candidate out."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dsplan.planner.asking import fewest_gpus, reach_of
from dsplan.planner.asking_lengths import lengths_answer
from dsplan.planner.candidates import candidates
from dsplan.planner.cautions import idle_flags, no_tp_rows, unkept_batch, untimed
from dsplan.planner.explaining import explanation
from dsplan.planner.models.adapting import AS_IT_IS, Adapting
from dsplan.planner.models.load import TRACE_TIMEOUT_SECONDS, Subject, load_subject
from dsplan.planner.rows import Bench, estimate_row, rehearsed_row, stages_of
from dsplan.planner.settings import Flags, Settings, settle
from dsplan.planner.terminal import Told, quiet
from dsplan.planner.tracing.tracer import trace
from dsplan.reports.estimate_table import best_row, shown_rows
from dsplan.schemas.answers import LengthsAnswer, Questions, Reach, any_answer
from dsplan.schemas.choices import Built
from dsplan.schemas.cluster import Cluster, parse_cluster
from dsplan.schemas.companion import Companion, read_companion
from dsplan.schemas.config import DsConfig, read_config
from dsplan.schemas.estimate import Estimate, ModelFacts, Row, StageRow
from dsplan.schemas.jsonfile import load_config_file
from dsplan.schemas.plan import Plan
from dsplan.schemas.problem import Problem
from dsplan.schemas.trace import Trace
from dsplan.schemas.units import PRECISION_BYTES


def estimate(
    model: str | Subject,
    *,
    cluster: Cluster | str = "1",
    config: str | Mapping[str, Any] | None = None,
    args: str | None = None,
    flags: Flags | None = None,
    sets: Mapping[str, str] | None = None,
    script_args: Sequence[str] = (),
    adapting: Adapting = AS_IT_IS,
    rehearse: bool = False,
    everything: bool = False,
    trace_timeout_seconds: float = TRACE_TIMEOUT_SECONDS,
    questions: Questions | None = None,
    reserve_bytes: int = 0,
    progress: Told = quiet,
) -> Estimate:
    """Bytes and seconds per GPU of every combination that flags, companion and config name.

    model: model.py[:NAME], a training script, a HF config, or one of these loaded already. config: a path, or the object
    itself. rehearse: rows are confirmed by running the engine on fake tensors: those that text shows, or with `everything`
    all. questions: what to answer beside the rows. reserve_bytes: of each GPU, left to others. Problem where nothing can be
    said.
    """
    cluster = (parse_cluster(cluster) if isinstance(cluster, str) else cluster).reserving(reserve_bytes)
    flags = flags or Flags()
    ds_config = read_config_argument(config)
    companion = read_companion(args) if args else None
    if isinstance(model, Subject):
        subject = model
    else:
        progress(f"loading {model}")
        seq_len = flags.seq_len or (companion.seq_len if companion else None)
        subject = load_subject(
            model,
            sets=sets or {},
            seq_len=seq_len,
            script_args=script_args,
            adapting=adapting,
            trace_timeout_seconds=trace_timeout_seconds,
        )
    settings = settle_for(subject, flags, cluster, companion, ds_config)
    progress(f"tracing {subject.source}")
    first = trace_for(subject, settings, precision=settings.precision[0])
    found = candidates(
        settings, cluster, tp_limit=first.tp_limit, num_blocks=len(first.blocks), no_tp_rule=first.no_tp_rule
    )
    rows = []
    for plan in found.plans:
        traced = trace_for(subject, settings, plan.precision, plan.micro_batch)
        rows.append(estimate_row(traced, replace(plan, seq_len=traced.seq_len), cluster))
    own = _own_index(rows, settings)
    if own is not None and own > 0:
        rows.insert(0, rows.pop(own))
        own = 0
    report = Estimate(
        model=model_facts(subject, first),
        cluster=cluster,
        engine=settings.engine,
        engine_version=engine_version(settings.engine),
        rows=tuple(rows),
        skipped=found.skipped,
        own=own,
        origins=settings.origins,
        notes=tuple(
            dict.fromkeys(
                (
                    *config_notes(config, ds_config, cluster, settings.engine),
                    *settings.notes,
                    *unkept_batch(flags, ds_config, companion, [row.plan for row in rows]),
                    *notes_of(subject, first, [row.plan for row in rows]),
                    *idle_flags(flags, [row.plan for row in rows]),
                    *untimed(rows),
                    *no_tp_rows(settings, first, cluster),
                )
            )
        ),
    )
    if rehearse:
        report = rehearsed(report, subject, ds_config, everything, progress)
    if questions is None:
        return report
    bench = Bench(subject=subject, cluster=cluster, own_seq_len=first.seq_len if settings.seq_len is None else None)
    return answered(report, bench, questions, settings.global_batch, progress)


def rehearsed(
    report: Estimate, subject: Subject, config: DsConfig | None, everything: bool, progress: Told
) -> Estimate:
    """The report with the rows that are shown confirmed; what cannot be rehearsed is said, and its formula stands."""
    shown = shown_rows(report, everything=everything)
    rows, refused = list(report.rows), []
    for done, row in enumerate(shown):
        progress("rehearsing", done, len(shown))
        try:
            rows[report.rows.index(row)] = rehearsed_row(
                subject, row, report.cluster, config.raw if config else subject.config
            )
        except Problem as problem:
            refused.append(f"not rehearsed: {problem}")
    return replace(report, rows=tuple(rows), notes=tuple(dict.fromkeys((*report.notes, *refused))))


def answered(
    report: Estimate, bench: Bench, questions: Questions, global_batch: int | None, progress: Told
) -> Estimate:
    """The report with what was asked beside its rows: of the user's own row, else of each that is shown."""
    shown = shown_rows(report, everything=False)
    asked = shown[:1] if report.own is not None else shown
    answers: list[Reach] = []
    for value in questions.most:
        for row in asked:
            progress(f"asking for the largest {value}, zero {row.plan.zero_stage}")
            answers.append(reach_of(bench, row.plan, value))
    if questions.fewest_gpus:
        answers += [fewest_gpus(bench, row.plan, global_batch) for row in asked]
    found: tuple[LengthsAnswer, ...] = ()
    if questions.lengths is not None:
        progress(f"asking for the lengths of {questions.lengths}")
        found = (lengths_answer(bench, best_row(report).plan, questions.lengths),)
    stages: tuple[StageRow, ...] = ()
    if questions.per_rank:
        stages = tuple(stage for row in shown for stage in stages_of(row, bench))
    if questions.timeline is not None:
        from dsplan.planner.timelines import write_timeline

        write_timeline(bench.traced(shown[0].plan), shown[0].plan, questions.timeline)
    why = None
    if questions.explain:
        progress("asking what the verdict rests on")
        why = explanation(bench, best_row(report), own=report.own is not None, global_batch=global_batch)
    return replace(report, answers=tuple(answers), lengths=found, per_rank=stages, explain=(why,) if why else ())


def notes_of(subject: Subject, traced: Trace, plans: Sequence[Plan]) -> tuple[str, ...]:
    """What the reader should know of these plans: the subject's and the trace's notes, and a batch that is not what it says."""
    notes = [*subject.notes, *traced.notes]
    if all(plan.layout.tp == 1 for plan in plans):
        notes = [note for note in notes if not note.startswith("tensor parallel")]
    width = PRECISION_BYTES[traced.precision]
    odd = [param for unit in traced.units for param in unit.params if param.dtype_bytes != width]
    if odd and any(plan.engine == "deepspeed" and plan.zero_stage == 3 for plan in plans):
        notes.append(
            f"{len(odd)} of the parameters, such as {odd[0].name}, hold no floats: at ZeRO-3 the formula of engine deepspeed "
            "counts their elements as those of the others; --rehearse counts their bytes"
        )
    said = (subject.config or {}).get("train_batch_size")
    if subject.micro_batch and isinstance(said, int):
        real = next((plan.global_batch for plan in plans if plan.global_batch != said), None)
        if real is not None and plans[0].micro_batch == subject.micro_batch:
            notes.append(
                f"the script feeds {subject.micro_batch} samples to each rank, so the global batch is {real}, "
                f"not the {said} of its train_batch_size; --micro-batch estimates another feed"
            )
    return tuple(dict.fromkeys(notes))


_NOT_MODELLED = (
    ("zero_optimization", "zero_quantized_weights", False),
    ("zero_optimization", "zero_quantized_gradients", False),
    ("zero_optimization", "zenflow", None),
    ("compile", "deepcompile", False),
    ("activation_checkpointing", "partition_activations", False),
    ("activation_checkpointing", "cpu_checkpointing", False),
)
"""(block, key, the value that asks for nothing): what changes bytes and is not in the formulas yet."""


def config_notes(
    source: str | Mapping[str, Any] | None, config: DsConfig | None, cluster: Cluster, engine: str
) -> list[str]:
    """What lint says of the configuration's file (errors and warnings), and which of its keys the formulas leave out.

    source: the --config that `config` was read from; one that is no file has no notes.
    """
    if config is None or not isinstance(source, str):
        return []
    from dsplan.planner.auditing.linting import lint

    raw = config.raw
    notes = []
    for finding in lint([source], cluster=cluster, engine=engine)[0].findings:
        if finding.severity != "info":
            place = f"{source}:{finding.span.line}:{finding.span.column}"
            notes.append(f"{place}: {finding.severity}: {finding.message} [{finding.rule} {finding.name}]")
    for block, key, nothing in _NOT_MODELLED:
        held = raw.get(block, {})
        if isinstance(held, Mapping) and held.get(key, nothing) not in (nothing, "auto", None):
            said = "" if isinstance(held[key], Mapping) else f" {json.dumps(held[key])}"
            notes.append(f"{source}: {block}.{key}{said} is not in these numbers yet")
    autocast = raw.get("torch_autocast")
    if isinstance(autocast, Mapping) and autocast.get("enabled") is True:
        notes.append(
            f"{source}: torch_autocast is not in these numbers yet: activations, and gathered parameters and gradients on their "
            "way, are those of the weights' own dtype, where autocast makes and sends many of them in 16 bits"
        )
    zero = raw.get("zero_optimization")
    if isinstance(zero, Mapping) and any(
        isinstance(zero.get(key), Mapping) and zero[key].get("device") == "nvme"
        for key in ("offload_optimizer", "offload_param")
    ):
        notes.append(f"{source}: of what is offloaded to nvme the host's buffers are counted")
    return notes


def merged(reports: Sequence[Estimate]) -> Estimate:
    """The reports of several engines as one: the rows of all, the head of the first."""
    first = reports[0]
    skipped: Counter[str] = Counter()
    for report in reports:
        skipped.update(report.skipped)
    return replace(
        first,
        rows=tuple(row for report in reports for row in report.rows),
        skipped=dict(skipped),
        answers=tuple(answer for report in reports for answer in report.answers),
        lengths=tuple(answer for report in reports for answer in report.lengths),
        per_rank=tuple(stage for report in reports for stage in report.per_rank),
        explain=tuple(why for report in reports for why in report.explain),
    )


def fits(reports: Sequence[Estimate]) -> bool:
    """Exit code 0: the user's own configuration fits or is tight, by each engine; without one, any row; true where nothing is known.

    Where something was asked, the answers decide: whether there is one; whether every step of the lengths fits.
    """
    answers = [answer for report in reports for answer in report.answers]
    lengths = [answer for report in reports for answer in report.lengths]
    if answers or lengths:
        return any_answer(answers) and not any(one.micro_batches_over for one in lengths)
    own = [report.rows[report.own] for report in reports if report.own is not None]
    fitting = [row.verdict in ("fits", "tight", "unknown") for row in own or merged(reports).rows]
    return all(fitting) if own else any(fitting)


def read_config_argument(config: str | Mapping[str, Any] | None) -> DsConfig | None:
    """DsConfig of --config: a path (DeepSpeed's own dialect) or an object."""
    if config is None:
        return None
    if isinstance(config, Mapping):
        return read_config(config)
    return read_config(load_config_file(config), config)


def settle_for(
    subject: Subject,
    flags: Flags,
    cluster: Cluster,
    companion: Companion | None,
    config: DsConfig | None,
    *,
    needs_batch: bool = True,
) -> Settings:
    """Settings of this subject: a script brings its own configuration, optimizer and batch."""
    script_config = read_config(subject.config, f"{subject.source} (its configuration)") if subject.config else None
    return settle(
        flags,
        cluster=cluster,
        companion=companion,
        config=config,
        script_config=script_config,
        script_micro_batch=subject.micro_batch,
        script_optimizer=subject.optimizer,
        built_at_3=_built_at_3(subject, flags.engine or ("deepspeed" if config else "native")),
        hidden_size=subject.hidden_size,
        needs_batch=needs_batch,
    )


def _built_at_3(subject: Subject, engine: str) -> Built:
    """At stage 3 DeepSpeed's zero.Init, and with it Trainer's and Accelerate's from_pretrained, makes shards at once.

    Source: transformers/modeling_utils.py, is_deepspeed_zero3_enabled. The native engine shards what was built whole.
    """
    return "meta" if engine == "deepspeed" and (subject.kind == "hf" or subject.built == "meta") else "host"


def trace_for(subject: Subject, settings: Settings, precision: str, micro_batch: int | None = None) -> Trace:
    """The trace that a plan needs (kept by the tracer, so that asking again costs nothing)."""
    return trace(
        subject,
        precision=precision,
        recompute=settings.recompute,
        micro_batch=micro_batch or settings.micro_batch or subject.micro_batch or 1,
        seq_len=settings.seq_len,
    )


def engine_version(engine: str) -> str:
    """The release that the numbers speak of."""
    from importlib.metadata import PackageNotFoundError, version

    if engine == "native":
        return version("dsplan")
    try:
        return version("deepspeed")
    except PackageNotFoundError:
        return "0.19.8"  # the release whose source the memory table follows


def model_facts(subject: Subject, traced: Trace) -> ModelFacts:
    """The head of the report. shapes_sha256 is over name and shape of every parameter, in order."""
    digest = hashlib.sha256()
    for unit in traced.units:
        for param in unit.params:
            digest.update(f"{param.name} {list(param.shape)}\n".encode())
    return ModelFacts(
        source=subject.source,
        params=traced.params,
        trainable_params=traced.trainable_params,
        forward_flops=traced.forward_flops,
        flops_source=traced.flops_source,
        backward_flops=traced.backward_flops,
        recompute_flops=traced.recompute_flops,
        shapes_sha256=digest.hexdigest(),
        notes=traced.notes,
    )


def _own_index(rows: Sequence[Row], settings: Settings) -> int | None:
    """The row that is the user's own configuration: its zero_stage and precision, and no tp or pp beyond data parallel."""
    if settings.own_zero is None:
        return None
    for index, row in enumerate(rows):
        plan = row.plan
        if plan.zero_stage == settings.own_zero and plan.precision == settings.own_precision:
            return index
    return None
