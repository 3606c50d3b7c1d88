"""dsplan lint: is this configuration right?"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from dsplan.planner.options import (
    ArgsOption,
    ClusterOption,
    EngineChoice,
    FailOn,
    LintFormat,
    ReaderName,
    WorldSizeOption,
    cluster_of,
    ids_of,
)
from dsplan.planner.terminal import CLEAN, FOUND, note


def lint(
    files: Annotated[list[str] | None, typer.Argument(help="Configs, or folders of them; - is stdin.")] = None,
    cluster: ClusterOption = None,
    world_size: WorldSizeOption = None,
    reader: Annotated[ReaderName, typer.Option("--for", help="Who will read the file.")] = ReaderName.auto,
    engine: Annotated[
        EngineChoice, typer.Option("--engine", help="Which engine will run it.")
    ] = EngineChoice.deepspeed,
    args: ArgsOption = None,
    model: Annotated[
        str | None, typer.Option("--model", help="MODEL: check also that it fits (with --cluster and a kind of GPU).")
    ] = None,
    select: Annotated[str | None, typer.Option("--select", help="Only these rule ids, by comma.")] = None,
    ignore: Annotated[str | None, typer.Option("--ignore", help="All but these rule ids, by comma.")] = None,
    fix: Annotated[bool, typer.Option("--fix", help="Apply the safe fixes to the files.")] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Print what --fix would change, and change nothing.")] = False,
    fail_on: Annotated[
        FailOn, typer.Option("--fail-on", help="The severity from which the exit code is 1.")
    ] = FailOn.error,
    format: Annotated[LintFormat, typer.Option("--format")] = LintFormat.text,
) -> None:
    """Is this DeepSpeed configuration right? Exit 0 clean, 1 findings, 2 could not run."""
    from dsplan.planner import fixing, linting

    chosen = cluster_of(cluster, world_size)
    how: dict[str, Any] = {
        "cluster": chosen,
        "reader": reader.value,
        "engine": engine.value,
        "args": args,
        "model": model,
        "select": ids_of(select),
        "ignore": ids_of(ignore),
    }
    found = linting.lint(files or ["."], **how)
    if diff:
        typer.echo(fixing.diff_of(found, linting.linter(**how)), nl=False)
    elif fix:
        fixed = fixing.write_fixes(found, linting.linter(**how))
        if fixed:
            note(f"fixed {fixed} finding{'s' if fixed > 1 else ''}")
            found = linting.lint(files or ["."], **how)
    if not diff:
        if format is LintFormat.json:
            from dsplan.reports import as_json

            typer.echo(as_json.findings(found))
        elif format is LintFormat.github:
            from dsplan.reports import as_github

            typer.echo(as_github.findings(found))
        else:
            from dsplan.reports import as_text

            typer.echo(as_text.findings(found, color=sys.stdout.isatty()))
    failing = ("error", "warning") if fail_on is FailOn.warning else ("error",)
    bad = any(finding.severity in failing for file in found for finding in file.findings)
    raise typer.Exit(FOUND if bad else CLEAN)
