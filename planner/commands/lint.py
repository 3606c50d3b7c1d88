"""dsplan lint: is this configuration right?"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from dsplan.planner.options import (
    ArgsOption,
    ClusterOption,
    DefineOption,
    EngineChoice,
    FailOn,
    LintFormat,
    ReaderName,
    WorldSizeOption,
    cluster_of,
    defines_of,
    ids_of,
)
from dsplan.planner.terminal import CLEAN, FOUND, note, version
from dsplan.schemas.finding import FileFindings
from dsplan.schemas.problem import Problem


def lint(
    files: Annotated[
        list[str] | None,
        typer.Argument(
            help="Configs, folders, globs, parts of files (train.yaml#/deepspeed, train.py#NAME); - is stdin. Default: this folder."
        ),
    ] = None,
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
    unsafe_fixes: Annotated[
        bool, typer.Option("--unsafe-fixes", help="Apply also the fixes that may change what is trained.")
    ] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Print what --fix would change, and change nothing.")] = False,
    define: DefineOption = None,
    baseline: Annotated[
        str | None, typer.Option("--baseline", help="Tell only what this file, of --write-baseline, does not hold.")
    ] = None,
    write_baseline: Annotated[
        str | None,
        typer.Option(
            "--write-baseline",
            metavar="[FILE]",
            help="Hold all that is found now; default: the file of --baseline, else dsplan-baseline.json.",
        ),
    ] = None,
    statistics: Annotated[
        bool, typer.Option("--statistics", help="How often each rule finds something, with --format text or json.")
    ] = False,
    fail_on: Annotated[
        FailOn | None,
        typer.Option("--fail-on", help="The severity from which the exit code is 1.", show_default="error"),
    ] = None,
    deepspeed_version: Annotated[
        str | None,
        typer.Option(
            "--deepspeed-version",
            metavar="X.Y.Z",
            help="The DeepSpeed that will read the file, as 0.14.5 or 0.14.x. Default: the installed one, else 0.19.8.",
        ),
    ] = None,
    versions: Annotated[
        bool, typer.Option("--versions", help="Which releases of DeepSpeed take each file, and why the others do not.")
    ] = False,
    before: Annotated[
        str | None,
        typer.Option("--from", metavar="X.Y.Z", help="What changes on an upgrade from this DeepSpeed (see --to)."),
    ] = None,
    after: Annotated[
        str | None,
        typer.Option("--to", metavar="X.Y.Z", help="The DeepSpeed that is upgraded to; with --from."),
    ] = None,
    exit_zero: Annotated[bool, typer.Option("--exit-zero", help="Exit 0 whatever is found.")] = False,
    format: Annotated[LintFormat, typer.Option("--format")] = LintFormat.text,
) -> None:
    """Is this DeepSpeed configuration right? Exit 0 clean, 1 findings, 2 could not run."""
    from dsplan.planner.auditing import fixing, linting
    from dsplan.planner.auditing import project as projects

    chosen = cluster_of(cluster, world_size)
    how: dict[str, Any] = {
        "cluster": chosen,
        "reader": reader.value,
        "engine": engine.value,
        "args": args,
        "model": model,
        "select": ids_of(select),
        "ignore": ids_of(ignore),
        "defines": defines_of(define),
    }
    if versions:
        if deepspeed_version or before or after or fix or unsafe_fixes or diff:
            raise Problem(
                "--versions asks all releases, and changes nothing; leave the other options of a release or a fix out"
            )
        if baseline is not None or write_baseline is not None or statistics or fail_on:
            raise Problem("--versions tells releases, not findings; leave baseline, --statistics and --fail-on out")
        told = _versions(files or ["."], how, format)
        raise typer.Exit(CLEAN if exit_zero else told)
    if after and not before:
        raise Problem(
            "--to goes with --from, as in --from 0.14.5 --to 0.19.8; --deepspeed-version names a release alone"
        )
    if after and deepspeed_version:
        raise Problem("--to and --deepspeed-version say the same; give one of them")
    if diff and (statistics or format is not LintFormat.text):
        raise Problem("--diff prints a diff and no report; leave --format and --statistics out, or --diff")
    how |= {"release": after or deepspeed_version, "before": before}
    for version_told in dict.fromkeys(filter(None, (before, after or deepspeed_version))):
        _note_nearest(version_told)
    found = linting.lint(files or ["."], **how)
    if diff:
        typer.echo(fixing.diff_of(found, linting.linter(**how), unsafe=unsafe_fixes), nl=False)
    elif fix or unsafe_fixes:
        fixed = fixing.write_fixes(found, linting.linter(**how), unsafe=unsafe_fixes)
        if fixed.count:
            note(f"fixed {fixed.count} finding{'s' if fixed.count > 1 else ''}")
            found = linting.lint(files or ["."], **how)
        for held in fixed.held_back:
            note(f"{held.rule} at {held.pointer or 'the top'} was left: its fix would bring another finding")
    if write_baseline is not None:
        baseline = _written(found, write_baseline or baseline)
    if baseline is not None:
        found = _new(found, baseline)
    if not diff:
        _tell(found, format, statistics)
    raise typer.Exit(FOUND if not exit_zero and projects.fails(found, fail_on and fail_on.value) else CLEAN)


def _versions(files: Sequence[str], how: dict[str, Any], format: LintFormat) -> int:
    """Prints which releases take each file. FOUND where a file is taken by none."""
    from dsplan.planner.auditing.accepting import acceptances
    from dsplan.reports import versions_table

    if format not in (LintFormat.text, LintFormat.json):
        raise Problem(f"--versions goes with --format text or json, not {format.value}")
    told = acceptances(files, **how)
    typer.echo(versions_table.as_json(told) if format is LintFormat.json else versions_table.text(told))
    return FOUND if any(not any(each.accepts for each in file.verdicts) for file in told) else CLEAN


def _note_nearest(told: str) -> None:
    """Where a release stands in for the one that is named."""
    from dsplan.schemas.releases import nearest

    release = nearest(told)
    if release != told.strip():
        note(f"DeepSpeed {told} is judged as {release}, the last release up to it whose keys are known here")


def _written(found: Sequence[FileFindings], path: str | None) -> str:
    from dsplan.planner.auditing import baseline

    path = path or baseline.DEFAULT
    held = baseline.write(found, path)
    note(f"{path} holds {held} finding{'' if held == 1 else 's'}")
    return path


def _new(found: Sequence[FileFindings], path: str) -> list[FileFindings]:
    """What the baseline does not hold; what it does is counted."""
    from dsplan.planner.auditing.baseline import compared

    told = compared(found, path)
    if told.known:
        note(f"{told.known} finding{'' if told.known == 1 else 's'} in the baseline {path}, not told")
    for name, rule, pointer in told.gone:
        note(f"{path}: {rule} at {pointer or 'the top'} of {name} is found no more; --write-baseline takes it out")
    return told.files


def _tell(found: Sequence[FileFindings], format: LintFormat, statistics: bool) -> None:
    """Prints the report: `findings` of reports/as_NAME.py, or `statistics` of it."""
    view = import_module(f"dsplan.reports.as_{format.value}")
    if statistics:
        if not hasattr(view, "statistics"):
            raise Problem(f"--statistics goes with --format text or json, not {format.value}")
        typer.echo(view.statistics(found))
        return
    more: dict[str, Any] = {}
    if format is LintFormat.text:
        more = {"color": sys.stdout.isatty()}
    elif format is LintFormat.sarif:
        from dsplan.planner.rules import RULES

        more = {"rules": list(RULES.values()), "version": version()}
    report = view.findings(found, **more)
    if report:
        typer.echo(report)
