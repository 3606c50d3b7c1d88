"""dsplan check: is what this launch line will read right?"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from dsplan.planner.options import ClusterOption, ReaderName, TextOrJson, WorldSizeOption, cluster_of
from dsplan.planner.terminal import CLEAN, COULD_NOT_RUN, FOUND, error, note


def check(
    line: Annotated[list[str], typer.Argument(help="The line that starts the training, behind --.", metavar="-- LINE")],
    execute: Annotated[bool, typer.Option("--exec", help="Run the line where no error is found.")] = False,
    cluster: ClusterOption = None,
    world_size: WorldSizeOption = None,
    reader: Annotated[ReaderName, typer.Option("--for", help="Who will read the configuration.")] = ReaderName.auto,
    format: Annotated[TextOrJson, typer.Option("--format")] = TextOrJson.text,
) -> None:
    """Lint all that a launch line will read, put before that line: dsplan check -- torchrun train.py ...

    Takes the number of GPUs from the launcher (torchrun, deepspeed, accelerate launch, srun, mpirun) or its environment, and
    configuration and arguments from the script's flags and files. Exit 0 clean, 1 errors, 2 could not read the line. With
    --exec the report goes to stderr, and the line takes this process's place where it is clean.
    """
    from dsplan.planner.auditing.checking import check as checked
    from dsplan.planner.auditing.checking import setup_of
    from dsplan.planner.auditing.launch_lines import read_line

    read = read_line(line, os.environ)
    setup = setup_of(read, {**os.environ, **read.environment}, cluster_of(cluster, world_size))
    for taken in setup.taken:
        note(taken)
    found = checked(setup, reader=reader.value)
    if format is TextOrJson.json:
        from dsplan.reports import as_json

        typer.echo(as_json.findings(found), err=execute)
    else:
        from dsplan.reports import as_text

        typer.echo(as_text.findings(found, color=sys.stdout.isatty() and not execute), err=execute)
    if any(finding.severity == "error" for file in found for finding in file.findings):
        raise typer.Exit(FOUND)
    if execute:
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            os.execvpe(read.words[0], list(read.words), {**os.environ, **read.environment})
        except OSError as failed:
            error(f"{read.words[0]} cannot be run ({failed.strerror})")
            raise typer.Exit(COULD_NOT_RUN) from failed
    raise typer.Exit(CLEAN)
