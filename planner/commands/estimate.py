"""dsplan estimate: bytes and seconds per GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer
from dsplan.planner.options import (
    QUESTIONS_GROUP,
    REPORT_GROUP,
    VARIED_GROUP,
    ArgsOption,
    AttentionOption,
    BuildName,
    ClusterOption,
    EngineChoice,
    EstimateFormat,
    ExpandableOption,
    Fewest,
    FreezeOption,
    LoraOption,
    LossOption,
    Most,
    OffloadName,
    PackedOption,
    QuantizeOption,
    RecomputeName,
    ReserveOption,
    SetOption,
    TraceTimeoutOption,
    WorldSizeOption,
    cluster_of,
    flags_of,
    reserve_of,
    sets_of,
    this_machine,
    timeout_of,
    value_of,
)
from dsplan.planner.terminal import CLEAN, FOUND, error, note, progress
from dsplan.schemas.answers import Questions


def _varied(name: str, help: str, **more: Any) -> Any:
    return typer.Option(name, help=help, rich_help_panel=VARIED_GROUP, **more)


def _question(name: str, help: str, **more: Any) -> Any:
    return typer.Option(name, help=help, rich_help_panel=QUESTIONS_GROUP, **more)


def _report(name: str, help: str, **more: Any) -> Any:
    return typer.Option(name, help=help, rich_help_panel=REPORT_GROUP, **more)


def estimate(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="model.py[:NAME], a training script, or a HF config.json or folder.")],
    config: Annotated[str | None, _varied("--config", "Your DeepSpeed JSON: its row comes first and decides.")] = None,
    args: ArgsOption = None,
    zero: Annotated[str | None, _varied("--zero", "ZeRO stages, by comma: 0,1,2,3.")] = None,
    precision: Annotated[str | None, _varied("--precision", "fp32,fp16,bf16.")] = None,
    tp: Annotated[str | None, _varied("--tp", "Tensor-parallel degrees, by comma.")] = None,
    pp: Annotated[str | None, _varied("--pp", "Pipeline-parallel degrees, by comma.")] = None,
    micro_batch: Annotated[int | None, _varied("--micro-batch", "Samples per GPU per forward.", min=1)] = None,
    accumulation: Annotated[int | None, _varied("--accumulation", "Micro-batches per step.", min=1)] = None,
    seq_len: Annotated[int | None, _varied("--seq-len", "Tokens per sample.", min=1)] = None,
    recompute: Annotated[
        RecomputeName | None, _varied("--recompute", "Activation checkpointing: of each block, or of attention alone.")
    ] = None,
    offload: Annotated[OffloadName | None, _varied("--offload", "What lives on the host.")] = None,
    optimizer: Annotated[str | None, _varied("--optimizer", "adamw, sgd, adamw-8bit, ...")] = None,
    sp: Annotated[int | None, _varied("--sp", "GPUs that share each sequence (Ulysses).", min=1)] = None,
    dp_replicate: Annotated[
        int | None, _varied("--dp-replicate", "Copies of the shards: hybrid sharding.", min=1)
    ] = None,
    schedule: Annotated[
        str | None, _varied("--schedule", "Of a pipeline: 1f1b, gpipe, interleaved:N.", metavar="NAME")
    ] = None,
    sequence_parallel: Annotated[
        bool | None,
        _varied("--sequence-parallel/--no-sequence-parallel", "With tp: what it leaves whole is split too."),
    ] = None,
    build: Annotated[
        BuildName | None,
        _varied(
            "--build", "Where the script makes the model: whole on each rank's host, or in shards (meta, zero.Init)."
        ),
    ] = None,
    engine: Annotated[EngineChoice | None, _varied("--engine", "deepspeed with --config, else native.")] = None,
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
    expression: Annotated[
        str | None,
        _question("--assert", "'device_bytes <= 72GiB': exit 1 where it does not hold.", metavar="EXPR"),
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

    assertion = parse_assertion(expression) if expression is not None else None
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
        zero,
        precision,
        tp,
        pp,
        micro_batch,
        accumulation,
        seq_len,
        recompute,
        offload,
        optimizer,
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

        reports = [
            estimating.estimate(model, flags=replace(flags, engine=name), progress=told, **options) for name in engines
        ]
    for text in dict.fromkeys(text for report in reports for text in report.notes):
        note(text)
    report = estimating.merged(reports)
    if format is EstimateFormat.json:
        typer.echo(estimate_table.as_json(report))
    elif format is EstimateFormat.markdown:
        typer.echo("\n\n".join(estimate_table.as_markdown(one, everything=everything) for one in reports))
    else:
        typer.echo(
            "\n\n".join(estimate_table.as_text(one, everything=everything, formulas=formulas) for one in reports)
        )
    failed = failure(assertion, report) if assertion else None
    if failed is not None:
        error(f"--assert {expression!r} does not hold: {failed}")
        raise typer.Exit(FOUND)
    raise typer.Exit(CLEAN if estimating.fits(report) else FOUND)
