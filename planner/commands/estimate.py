"""dsplan estimate: bytes and seconds per GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer
from dsplan.planner.options import (
    QUESTIONS_GROUP,
    REPORT_GROUP,
    ArgsOption,
    AttentionOption,
    ClusterOption,
    EngineChoice,
    EstimateFormat,
    ExpandableOption,
    Fewest,
    FreezeOption,
    LoraOption,
    LossOption,
    Most,
    PackedOption,
    QuantizeOption,
    ReserveOption,
    SetOption,
    TraceTimeoutOption,
    WorldSizeOption,
    cluster_of,
    reserve_of,
    sets_of,
    this_machine,
    timeout_of,
    value_of,
)
from dsplan.planner.plan_options import (
    AccumulationOption,
    BuildOption,
    DpReplicateOption,
    MicroBatchOption,
    OffloadOption,
    OptimizerOption,
    PpOption,
    PrecisionOption,
    RecomputeOption,
    ScheduleOption,
    SeqLenOption,
    SequenceParallelOption,
    SpOption,
    TpOption,
    ZeroOption,
    flags_of,
    varied,
)
from dsplan.planner.terminal import CLEAN, FOUND, error, note, progress
from dsplan.schemas.answers import Questions


def _question(name: str, help: str, **more: Any) -> Any:
    return typer.Option(name, help=help, rich_help_panel=QUESTIONS_GROUP, **more)


def _report(name: str, help: str, **more: Any) -> Any:
    return typer.Option(name, help=help, rich_help_panel=REPORT_GROUP, **more)


def estimate(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="model.py[:NAME], a training script, or a HF config.json or folder.")],
    config: Annotated[str | None, varied("--config", "Your DeepSpeed JSON: its row comes first and decides.")] = None,
    args: ArgsOption = None,
    zero: ZeroOption = None,
    precision: PrecisionOption = None,
    tp: TpOption = None,
    pp: PpOption = None,
    micro_batch: MicroBatchOption = None,
    accumulation: AccumulationOption = None,
    seq_len: SeqLenOption = None,
    recompute: RecomputeOption = None,
    offload: OffloadOption = None,
    optimizer: OptimizerOption = None,
    sp: SpOption = None,
    dp_replicate: DpReplicateOption = None,
    schedule: ScheduleOption = None,
    sequence_parallel: SequenceParallelOption = None,
    build: BuildOption = None,
    engine: Annotated[EngineChoice | None, varied("--engine", "deepspeed with --config, else native.")] = None,
    cluster: ClusterOption = None,
    world_size: WorldSizeOption = None,
    reserve: ReserveOption = None,
    expandable_segments: ExpandableOption = False,
    sets: SetOption = None,
    lora: LoraOption = None,
    quantize: QuantizeOption = None,
    freeze: FreezeOption = None,
    loss: LossOption = None,
    attention: AttentionOption = None,
    packed: PackedOption = False,
    trace_timeout: TraceTimeoutOption = None,
    most: Annotated[
        list[Most] | None, _question("--max", "The largest that fits: of your own row, else of each shown. Repeat it.")
    ] = None,
    fewest: Annotated[
        Fewest | None, _question("--min", "The fewest GPUs on which it fits: dp grows, micro_batch stays.")
    ] = None,
    lengths: Annotated[
        str | None,
        _question("--lengths", "Sequence lengths, one a line: the worst batch, and the steps over.", metavar="FILE"),
    ] = None,
    expressions: Annotated[
        list[str] | None,
        _question(
            "--assert", "'device_bytes <= 72GiB': exit 1 where it does not hold. Repeat it: all must.", metavar="EXPR"
        ),
    ] = None,
    rehearse: Annotated[
        bool, _question("--rehearse", "Confirm the rows shown by running the engine on fake tensors.")
    ] = False,
    everything: Annotated[bool, _report("--all", "Show every row.")] = False,
    formulas: Annotated[bool, _report("--formulas", "Print each item's formula with its numbers.")] = False,
    per_rank: Annotated[bool, _report("--per-rank", "Show every pipeline stage's ranks beside the fullest.")] = False,
    timeline: Annotated[
        str | None,
        _report("--timeline", "Write the first row's live bytes over a step as a Chrome trace.", metavar="FILE"),
    ] = None,
    format: Annotated[EstimateFormat, _report("--format", "What stdout holds.")] = EstimateFormat.text,
) -> None:
    """Bytes and seconds per GPU, for each ZeRO stage x precision x parallel split.

    Arguments after -- belong to a training script. Exit 0 fits, 1 does not fit, 2 could not run.
    """
    from dsplan.planner.asserting import failure, parse_assertion
    from dsplan.planner.models.adapting import adapting_of

    assertions = {text: parse_assertion(text) for text in expressions or ()}
    questions = Questions(
        most=tuple(dict.fromkeys(value.value for value in most or ())),
        fewest_gpus=fewest is not None,
        lengths=lengths,
        per_rank=per_rank,
        timeline=timeline,
        explain=True,
    )
    options: dict[str, Any] = {
        "cluster": replace(cluster_of(cluster, world_size) or this_machine(), expandable_segments=expandable_segments),
        "config": config,
        "args": args,
        "sets": sets_of(sets),
        "script_args": context.args,
        "adapting": adapting_of(lora, value_of(quantize), freeze, loss, value_of(attention), packed),
        "trace_timeout_seconds": timeout_of(trace_timeout),
        "reserve_bytes": reserve_of(reserve),
        "rehearse": rehearse,
        "everything": everything,
        "questions": questions,
    }
    flags = flags_of(
        zero=zero,
        precision=precision,
        tp=tp,
        pp=pp,
        micro_batch=micro_batch,
        accumulation=accumulation,
        seq_len=seq_len,
        recompute=recompute,
        offload=offload,
        optimizer=optimizer,
        sp=sp,
        dp_replicate=dp_replicate,
        schedule=schedule,
        sequence_parallel=sequence_parallel,
        built=build,
    )
    engines: tuple[Any, ...] = (
        ("native", "deepspeed") if engine is EngineChoice.both else (engine.value if engine else None,)
    )
    with progress() as told:
        from dsplan.planner import estimating
        from dsplan.reports import estimate_table

        reports = []
        for name in engines:
            reports.append(estimating.estimate(model, flags=replace(flags, engine=name), progress=told, **options))
            options["questions"] = replace(questions, timeline=None)  # one file, of the first engine's first row
    for text in dict.fromkeys(text for report in reports for text in report.notes):
        note(text)
    if timeline is not None:
        note(f"wrote {timeline}; https://ui.perfetto.dev opens it")
    shown = {"everything": everything, "formulas": formulas}
    if format is EstimateFormat.json:
        typer.echo(estimate_table.as_json(estimating.merged(reports), formulas=formulas))
    elif format is EstimateFormat.markdown:
        typer.echo("\n\n".join(estimate_table.as_markdown(one, **shown) for one in reports))
    else:
        typer.echo("\n\n".join(estimate_table.as_text(one, **shown) for one in reports))
    failed = {text: said for text, one in assertions.items() if (said := failure(one, reports)) is not None}
    for text, said in failed.items():
        error(f"--assert {text!r} does not hold: {said}")
    raise typer.Exit(FOUND if failed or not estimating.fits(reports) else CLEAN)
