"""dsplan resolve: what does the reader really hold?"""

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
from dsplan.planner.terminal import note


def resolve(
    file: Annotated[str, typer.Argument(help="A config; - is stdin; train.yaml#/deepspeed a part of a file.")],
    cluster: ClusterOption = None,
    world_size: WorldSizeOption = None,
    reader: Annotated[ReaderName, typer.Option("--for", help="Who will read the file.")] = ReaderName.auto,
    args: ArgsOption = None,
    everything: Annotated[bool, typer.Option("--all", help="Also the blocks that the file does not have.")] = False,
    define: DefineOption = None,
    format: Annotated[TextOrJson, typer.Option("--format")] = TextOrJson.text,
) -> None:
    """The configuration as the reader really holds it, each value with its origin. Exit 0, or 2 where the reader refuses it.

    Origins: file (as written), default, auto (an "auto" that the reader fills, and from where), reader (put there unasked),
    coerced ("2" is 2, 5e8 is 500000000), derived (follows from other keys), ignored (nothing reads it).
    """
    from dsplan.planner.auditing.resolving import resolve as resolved_of
    from dsplan.reports import resolved_table

    companion = None
    if args is not None:
        from dsplan.schemas.companion import read_companion

        companion = read_companion(args)
    chosen = cluster_of(cluster, world_size)
    value = resolved_of(
        file,
        reader=reader.value,
        companion=companion,
        cluster=chosen,
        everything=everything,
        defines=defines_of(define),
    )
    for refusal in value.refusals:
        note(refusal)
    show = resolved_table.resolved_json if format is TextOrJson.json else resolved_table.resolved
    typer.echo(show(value))
