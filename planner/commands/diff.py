"""dsplan diff: do two configurations train the same model?"""

from __future__ import annotations

from typing import Annotated

import typer
from dsplan.planner.options import (
    ArgsOption,
    ClusterOption,
    DefineOption,
    ReaderName,
    TextOrJson,
    WorldSizeOption,
    cluster_of,
    defines_of,
)
from dsplan.planner.terminal import CLEAN, FOUND, note


def diff(
    a: Annotated[str, typer.Argument(help="A config.")],
    b: Annotated[str, typer.Argument(help="Another one.")],
    cluster: ClusterOption = None,
    world_size: WorldSizeOption = None,
    reader: Annotated[ReaderName, typer.Option("--for", help="Who will read both files.")] = ReaderName.auto,
    args: ArgsOption = None,
    define: DefineOption = None,
    format: Annotated[TextOrJson, typer.Option("--format")] = TextOrJson.text,
) -> None:
    """What differs between two configurations, by effective value, and whether they train the same model.

    Exit 0 where they train the same model, 1 where they do not, 2 where one of them cannot be read. Global batch, precision,
    clipping, optimizer and schedule decide; ZeRO stage, offload, buckets, prints and the like do not.
    """
    from dsplan.planner.auditing.comparing import compare
    from dsplan.planner.auditing.resolving import resolve_pair
    from dsplan.reports import resolved_table

    companion = None
    if args is not None:
        from dsplan.schemas.companion import read_companion

        companion = read_companion(args)
    chosen = cluster_of(cluster, world_size)
    sides = resolve_pair(a, b, reader=reader.value, companion=companion, cluster=chosen, defines=defines_of(define))
    found = compare(*sides)
    for refusal in (*sides[0].refusals, *sides[1].refusals):
        note(refusal)
    show = resolved_table.comparison_json if format is TextOrJson.json else resolved_table.comparison
    typer.echo(show(found))
    raise typer.Exit(CLEAN if found.same_model else FOUND)
