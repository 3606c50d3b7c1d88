"""dsplan checkpoint: what is in checkpoints, whether they are whole, and their conversion. Nothing in them is ever run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from dsplan.planner.options import TextOrJson
from dsplan.planner.terminal import CLEAN, FOUND, note
from dsplan.schemas.checkpoint import PRECISIONS
from dsplan.schemas.problem import Problem
from dsplan.schemas.units import parse_bytes

FolderArgument = Annotated[Path, typer.Argument(metavar="DIR", help="A folder of checkpoints, or one of them.")]
FormatOption = Annotated[TextOrJson, typer.Option("--format")]
OutOption = Annotated[Path, typer.Option("-o", "--output", metavar="OUT", help="A new folder.")]

checkpoint = typer.Typer(
    name="checkpoint",
    help="Inspect, verify, consolidate and import checkpoints. Nothing in them is ever run.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@checkpoint.command("inspect")
def show(folder: FolderArgument, format: FormatOption = TextOrJson.text) -> None:
    """What each checkpoint holds: step, ranks, ZeRO stage, precision, parameters, optimizer, schedule, and who wrote it."""
    from dsplan.reports import checkpoint_table
    from dsplan.runtime.checkpoints.inspecting import inspect

    found = inspect(folder)
    typer.echo((checkpoint_table.contents_json if format is TextOrJson.json else checkpoint_table.contents_text)(found))
    raise typer.Exit(CLEAN)


@checkpoint.command("verify")
def check(folder: FolderArgument, format: FormatOption = TextOrJson.text) -> None:
    """Read every byte and compare checksums. Exit 0 where all checkpoints are whole, 1 where one is damaged, 2 where there is none."""
    from dsplan.reports import checkpoint_table
    from dsplan.runtime.checkpoints.inspecting import verify

    found = verify(folder)
    for remark in found.remarks:
        note(remark)
    typer.echo((checkpoint_table.verified_json if format is TextOrJson.json else checkpoint_table.verified_text)(found))
    raise typer.Exit(CLEAN if found.whole else FOUND)


@checkpoint.command("consolidate")
def consolidate(
    folder: FolderArgument,
    out: OutOption,
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="|".join(PRECISIONS), help="Of floating numbers; the masters are fp32.")
    ] = "fp32",
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", metavar="BYTES", help="Of one file, as 5GB or 500MB.")
    ] = "5GB",
    format: FormatOption = TextOrJson.text,
) -> None:
    """The model alone, as safetensors that plain PyTorch and Hugging Face load; from dsplan's checkpoints and DeepSpeed's."""
    from dsplan.reports import checkpoint_table
    from dsplan.runtime.checkpoints import consolidating
    from dsplan.runtime.checkpoints.choosing import choose

    precision = next((name for name in PRECISIONS if name == dtype), None)
    if precision is None:
        raise Problem(f"--dtype is {dtype}, but must be one of {', '.join(PRECISIONS)}")
    try:
        most_bytes = parse_bytes(max_shard_size)
    except ValueError as error:
        raise Problem(f"--max-shard-size: {error}") from error
    if most_bytes <= 0:
        raise Problem(f"--max-shard-size is {max_shard_size}, but must be more than nothing, as 5GB")
    written = consolidating.consolidate(choose(folder), out, precision, most_bytes)
    for text in written.notes:
        note(text)
    show_written = checkpoint_table.written_json if format is TextOrJson.json else checkpoint_table.written_text
    typer.echo(show_written(written))
    raise typer.Exit(CLEAN)


@checkpoint.command("import")
def take_over(
    folder: FolderArgument,
    out: OutOption,
    no_optimizer: Annotated[bool, typer.Option("--no-optimizer", help="Weights, counters and schedule alone.")] = False,
    format: FormatOption = TextOrJson.text,
) -> None:
    """DeepSpeed's own checkpoint (ZeRO 0 to 3) as one that the native engine resumes, on any number of ranks."""
    from dsplan.reports import checkpoint_table
    from dsplan.runtime.checkpoints.choosing import choose
    from dsplan.runtime.checkpoints.importing.deepspeed import import_checkpoint

    chosen = choose(folder)
    if chosen.kind in ("native", "model"):
        what = "dsplan's own already" if chosen.kind == "native" else "a model alone"
        raise Problem(f"{chosen.path} is {what}: load it with load_checkpoint; import is for DeepSpeed's checkpoints")
    written = import_checkpoint(chosen.path, out, with_optimizer=not no_optimizer)
    for text in written.notes:
        note(text)
    show_written = checkpoint_table.written_json if format is TextOrJson.json else checkpoint_table.written_text
    typer.echo(show_written(written))
    raise typer.Exit(CLEAN)
