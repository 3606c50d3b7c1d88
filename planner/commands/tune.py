"""dsplan tune: which configuration is best?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from dsplan.planner.options import (
    REPORT_GROUP,
    ArgsOption,
    AttentionOption,
    ClusterOption,
    EngineName,
    ExpandableOption,
    FreezeOption,
    LoraOption,
    LossOption,
    Objective,
    PackedOption,
    QuantizeOption,
    ReserveOption,
    SetOption,
    TextOrJson,
    TraceTimeoutOption,
    WorldSizeOption,
    cluster_of,
    reserve_of,
    sets_of,
    timeout_of,
    value_of,
)
from dsplan.planner.plan_options import (
    BuildOption,
    OffloadOption,
    OptimizerOption,
    PrecisionOption,
    RecomputeOption,
    SeqLenOption,
    ZeroOption,
    flags_of,
    varied,
)
from dsplan.planner.terminal import CLEAN, FOUND, note, progress
from dsplan.schemas.problem import Problem


def tune(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="As for estimate.")],
    config: Annotated[str | None, varied("--config", "Your DeepSpeed JSON: what it says stays.")] = None,
    args: ArgsOption = None,
    global_batch: Annotated[int | None, varied("--global-batch", "Samples per step.", min=1)] = None,
    free: Annotated[
        str | None,
        varied(
            "--free",
            "What may change although the config says it, by comma: global_batch, precision.",
            metavar="NAMES",
        ),
    ] = None,
    objective: Annotated[Objective, varied("--objective", "What is best.")] = Objective.throughput,
    trials: Annotated[int, varied("--trials", "Rehearse the K best before choosing.", min=0, metavar="K")] = 0,
    zero: ZeroOption = None,
    precision: PrecisionOption = None,
    seq_len: SeqLenOption = None,
    recompute: RecomputeOption = None,
    offload: OffloadOption = None,
    optimizer: OptimizerOption = None,
    build: BuildOption = None,
    engine: Annotated[EngineName | None, varied("--engine", "native unless said.")] = None,
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
    output: Annotated[
        Path,
        typer.Option("-o", "--output", help="Folder for plan.json and ds_config.json.", rich_help_panel=REPORT_GROUP),
    ] = Path(),
    format: Annotated[
        TextOrJson, typer.Option("--format", help="What stdout holds.", rich_help_panel=REPORT_GROUP)
    ] = TextOrJson.text,
) -> None:
    """Which configuration is best? Writes plan.json and ds_config.json.

    Tried are ZeRO stages, micro-batches and recompute, or those of them that an option names. Exit 0 something fits, 1
    nothing does, 2 could not run.
    """
    from dsplan.planner.models.adapting import adapting_of

    adapting = adapting_of(lora, value_of(quantize), freeze, loss, value_of(attention), packed)
    chosen = cluster_of(cluster, world_size)
    if chosen is None:
        raise Problem("tune needs --cluster, for example --cluster 8xH100-80GB")
    flags = flags_of(
        zero=zero,
        precision=precision,
        seq_len=seq_len,
        recompute=recompute,
        offload=offload,
        optimizer=optimizer,
        built=build,
    )
    flags = replace(flags, engine=engine.value if engine else "native")
    with progress() as told:
        from dsplan.planner import tuned_files, tuning

        tuned = tuning.tune(
            model,
            cluster=replace(chosen, expandable_segments=expandable_segments),
            config=config,
            args=args,
            global_batch=global_batch,
            free=tuple(part.strip() for part in free.split(",")) if free else (),
            objective=objective.value,
            trials=trials,
            flags=flags,
            sets=sets_of(sets),
            script_args=context.args,
            adapting=adapting,
            trace_timeout_seconds=timeout_of(trace_timeout),
            reserve_bytes=reserve_of(reserve),
            progress=told,
        )
    for text in tuned.notes:
        note(text)
    if tuned.plan is not None:
        tuned_files.write(tuned, output)
    from dsplan.reports import tune_table

    typer.echo(tune_table.as_json(tuned) if format is TextOrJson.json else tune_table.as_text(tuned, output))
    raise typer.Exit(CLEAN if tuned.plan is not None else FOUND)
