"""dsplan tune: which configuration is best?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from dsplan.planner.options import (
    REPORT_GROUP,
    VARIED_GROUP,
    ArgsOption,
    AttentionOption,
    ClusterOption,
    EngineName,
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
from dsplan.planner.terminal import CLEAN, FOUND, note, progress
from dsplan.schemas.problem import Problem


def tune(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="As for estimate.")],
    cluster: ClusterOption = None,
    world_size: WorldSizeOption = None,
    config: Annotated[
        str | None,
        typer.Option("--config", help="Your DeepSpeed JSON: what it says stays.", rich_help_panel=VARIED_GROUP),
    ] = None,
    args: ArgsOption = None,
    global_batch: Annotated[
        int | None, typer.Option("--global-batch", min=1, help="Samples per step.", rich_help_panel=VARIED_GROUP)
    ] = None,
    free: Annotated[
        str | None,
        typer.Option(
            "--free",
            help="What may change although the config says it, by comma: global_batch, precision.",
            rich_help_panel=VARIED_GROUP,
        ),
    ] = None,
    objective: Annotated[
        Objective, typer.Option("--objective", help="What is best.", rich_help_panel=VARIED_GROUP)
    ] = Objective.throughput,
    trials: Annotated[
        int, typer.Option("--trials", min=0, help="Rehearse the K best before choosing.", rich_help_panel=VARIED_GROUP)
    ] = 0,
    engine: Annotated[
        EngineName | None, typer.Option("--engine", help="native unless said.", rich_help_panel=VARIED_GROUP)
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option("--seq-len", min=1, help="Tokens per sample.", rich_help_panel=VARIED_GROUP)
    ] = None,
    sets: SetOption = None,
    lora: LoraOption = None,
    quantize: QuantizeOption = None,
    freeze: FreezeOption = None,
    loss: LossOption = None,
    attention: AttentionOption = None,
    packed: PackedOption = False,
    trace_timeout: TraceTimeoutOption = None,
    reserve: ReserveOption = None,
    output: Annotated[
        Path,
        typer.Option("-o", "--output", help="Folder for plan.json and ds_config.json.", rich_help_panel=REPORT_GROUP),
    ] = Path(),
    format: Annotated[
        TextOrJson, typer.Option("--format", help="What stdout holds.", rich_help_panel=REPORT_GROUP)
    ] = TextOrJson.text,
) -> None:
    """Which configuration is best? Writes plan.json and ds_config.json. Exit 1 where nothing fits."""
    from dsplan.planner.models.adapting import adapting_of

    adapting = adapting_of(lora, value_of(quantize), freeze, loss, value_of(attention), packed)
    chosen = cluster_of(cluster, world_size)
    if chosen is None:
        raise Problem("tune needs --cluster, for example --cluster 8xH100-80GB")
    with progress() as told:
        from dsplan.planner import tuning

        tuned = tuning.tune(
            model,
            cluster=chosen,
            config=config,
            args=args,
            global_batch=global_batch,
            free=tuple(part.strip() for part in free.split(",")) if free else (),
            objective=objective.value,
            trials=trials,
            engine=engine.value if engine else "native",
            seq_len=seq_len,
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
        tuning.write(tuned, output)
    from dsplan.reports import tune_table

    typer.echo(tune_table.as_json(tuned) if format is TextOrJson.json else tune_table.as_text(tuned, output))
    raise typer.Exit(CLEAN if tuned.plan is not None else FOUND)
