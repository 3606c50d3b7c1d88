"""dsplan estimate: bytes and seconds per GPU."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from dsplan.planner.options import (
    ArgsOption,
    AttentionOption,
    ClusterOption,
    EngineChoice,
    EstimateFormat,
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
    WorldSizeOption,
    cluster_of,
    flags_of,
    reserve_of,
    sets_of,
    this_machine,
    value_of,
)
from dsplan.planner.terminal import CLEAN, FOUND, error, note, progress
from dsplan.schemas.answers import Questions


def estimate(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="model.py[:NAME], a training script, or a HF config.json or folder.")],
    config: Annotated[str | None, typer.Option("--config", help="Your DeepSpeed JSON.")] = None,
    args: ArgsOption = None,
    cluster: ClusterOption = None,
    world_size: WorldSizeOption = None,
    zero: Annotated[str | None, typer.Option("--zero", help="ZeRO stages, by comma: 0,1,2,3.")] = None,
    precision: Annotated[str | None, typer.Option("--precision", help="fp32,fp16,bf16.")] = None,
    tp: Annotated[str | None, typer.Option("--tp", help="Tensor-parallel degrees, by comma.")] = None,
    pp: Annotated[str | None, typer.Option("--pp", help="Pipeline-parallel degrees, by comma.")] = None,
    micro_batch: Annotated[int | None, typer.Option("--micro-batch", min=1)] = None,
    accumulation: Annotated[int | None, typer.Option("--accumulation", min=1)] = None,
    seq_len: Annotated[int | None, typer.Option("--seq-len", min=1)] = None,
    recompute: Annotated[RecomputeName | None, typer.Option("--recompute")] = None,
    offload: Annotated[OffloadName | None, typer.Option("--offload")] = None,
    optimizer: Annotated[str | None, typer.Option("--optimizer", help="adamw, sgd, ...")] = None,
    engine: Annotated[EngineChoice | None, typer.Option("--engine")] = None,
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="Confirm the rows shown by running the engine on fake tensors.")
    ] = False,
    sets: SetOption = None,
    lora: LoraOption = None,
    quantize: QuantizeOption = None,
    freeze: FreezeOption = None,
    loss: LossOption = None,
    attention: AttentionOption = None,
    packed: PackedOption = False,
    everything: Annotated[bool, typer.Option("--all", help="Show every row.")] = False,
    formulas: Annotated[bool, typer.Option("--formulas", help="Print each item's formula with its numbers.")] = False,
    expression: Annotated[
        str | None,
        typer.Option("--assert", help="'device_bytes <= 72GiB': exit 1 where it does not hold."),
    ] = None,
    most: Annotated[
        list[Most] | None,
        typer.Option(
            "--max", help="How large it may be and still fit; for your own row, else for each shown. Repeat it."
        ),
    ] = None,
    fewest: Annotated[
        Fewest | None, typer.Option("--min", help="On how few GPUs it fits: dp grows, micro_batch stays.")
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            "--lengths", help="Sequence lengths, one a line: the worst batch, and the share over.", metavar="FILE"
        ),
    ] = None,
    reserve: ReserveOption = None,
    format: Annotated[EstimateFormat, typer.Option("--format")] = EstimateFormat.text,
) -> None:
    """Bytes and seconds per GPU, for each ZeRO stage x precision x parallel split.

    Arguments after -- belong to a training script. Exit 0 fits, 1 does not fit, 2 could not run.
    """
    from dsplan.planner.asserting import holds, parse_assertion
    from dsplan.planner.models.adapting import adapting_of

    assertion = parse_assertion(expression) if expression is not None else None
    reserve_bytes = reserve_of(reserve)
    questions = Questions(
        most=tuple(dict.fromkeys(value.value for value in most or ())),
        fewest_gpus=fewest is not None,
        lengths=lengths,
        explain=True,
    )
    flags = flags_of(zero, precision, tp, pp, micro_batch, accumulation, seq_len, recompute, offload, optimizer)
    adapting = adapting_of(lora, value_of(quantize), freeze, loss, value_of(attention), packed)
    chosen = cluster_of(cluster, world_size) or this_machine()
    engines: tuple[Any, ...] = (
        ("native", "deepspeed") if engine is EngineChoice.both else (engine.value if engine else None,)
    )
    with progress() as told:
        from dataclasses import replace

        from dsplan.planner import estimating
        from dsplan.reports import estimate_table

        reports = [
            estimating.estimate(
                model,
                cluster=chosen,
                config=config,
                args=args,
                flags=replace(flags, engine=name),
                sets=sets_of(sets),
                script_args=context.args,
                adapting=adapting,
                rehearse=rehearse,
                show=None if everything or format is EstimateFormat.json else estimate_table.MOST_ROWS,
                questions=questions,
                reserve_bytes=reserve_bytes,
                progress=told,
            )
            for name in engines
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
    if assertion and not holds(assertion, report):
        error(f"--assert {expression!r} does not hold")
        raise typer.Exit(FOUND)
    raise typer.Exit(CLEAN if estimating.fits(report) else FOUND)
