"""The command line: parse, call, print, exit code. No arithmetic, and nothing heavy imported before it is needed."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from dsplan.planner.options import (
    SCRIPT_ARGUMENTS,
    ArgsOption,
    ClusterOption,
    EngineChoice,
    EngineName,
    EstimateFormat,
    FailOn,
    LintFormat,
    Objective,
    OffloadName,
    ReaderName,
    RecomputeName,
    SetOption,
    TextOrJson,
    WorldSizeOption,
    cluster_of,
    flags_of,
    ids_of,
    sets_of,
    this_machine,
)
from dsplan.schemas.problem import Problem

CLEAN, FOUND, COULD_NOT_RUN = 0, 1, 2

app = typer.Typer(
    name="dsplan",
    help="Audit, plan and run PyTorch training that is configured by a DeepSpeed JSON.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


_UsageError: Any = typer.BadParameter.__bases__[0]
"""Click's, from wherever typer has it: its own copy, or the package."""


@app.command()
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
            _note(f"fixed {fixed} finding{'s' if fixed > 1 else ''}")
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


@app.command(context_settings=SCRIPT_ARGUMENTS)
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
    everything: Annotated[bool, typer.Option("--all", help="Show every row.")] = False,
    formulas: Annotated[bool, typer.Option("--formulas", help="Print each item's formula with its numbers.")] = False,
    expression: Annotated[
        str | None,
        typer.Option("--assert", help="'device_bytes <= 72GiB': exit 1 where it does not hold."),
    ] = None,
    format: Annotated[EstimateFormat, typer.Option("--format")] = EstimateFormat.text,
) -> None:
    """Bytes and seconds per GPU, for each ZeRO stage x precision x parallel split.

    Arguments after -- belong to a training script. Exit 0 fits, 1 does not fit, 2 could not run.
    """
    from dsplan.planner.asserting import holds, parse_assertion

    assertion = parse_assertion(expression) if expression is not None else None
    flags = flags_of(zero, precision, tp, pp, micro_batch, accumulation, seq_len, recompute, offload, optimizer)
    chosen = cluster_of(cluster, world_size) or this_machine()
    engines: tuple[Any, ...] = (
        ("native", "deepspeed") if engine is EngineChoice.both else (engine.value if engine else None,)
    )
    with _progress() as progress:
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
                rehearse=rehearse,
                show=None if everything or format is EstimateFormat.json else estimate_table.MOST_ROWS,
                progress=progress,
            )
            for name in engines
        ]
    for note in dict.fromkeys(note for report in reports for note in report.notes):
        _note(note)
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
        _error(f"--assert {expression!r} does not hold")
        raise typer.Exit(FOUND)
    raise typer.Exit(CLEAN if estimating.fits(report) else FOUND)


@app.command(context_settings=SCRIPT_ARGUMENTS)
def tune(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="As for estimate.")],
    cluster: ClusterOption = None,
    world_size: WorldSizeOption = None,
    config: Annotated[str | None, typer.Option("--config", help="Your DeepSpeed JSON: what it says stays.")] = None,
    args: ArgsOption = None,
    global_batch: Annotated[int | None, typer.Option("--global-batch", min=1)] = None,
    free: Annotated[
        str | None,
        typer.Option(
            "--free",
            help="What may change although the config says it, by comma: global_batch, precision, optimizer.",
        ),
    ] = None,
    objective: Annotated[Objective, typer.Option("--objective")] = Objective.throughput,
    trials: Annotated[int, typer.Option("--trials", min=0, help="Rehearse the K best before choosing.")] = 0,
    engine: Annotated[EngineName | None, typer.Option("--engine")] = None,
    seq_len: Annotated[int | None, typer.Option("--seq-len", min=1)] = None,
    sets: SetOption = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for plan.json and ds_config.json.")] = Path(),
    format: Annotated[TextOrJson, typer.Option("--format")] = TextOrJson.text,
) -> None:
    """Which configuration is best? Writes plan.json and ds_config.json. Exit 1 where nothing fits."""
    chosen = cluster_of(cluster, world_size)
    if chosen is None:
        raise Problem("tune needs --cluster, for example --cluster 8xH100-80GB")
    with _progress() as progress:
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
            progress=progress,
        )
    for note in tuned.notes:
        _note(note)
    if tuned.plan is not None:
        tuning.write(tuned, output)
    from dsplan.reports import tune_table

    typer.echo(tune_table.as_json(tuned) if format is TextOrJson.json else tune_table.as_text(tuned, output))
    raise typer.Exit(CLEAN if tuned.plan is not None else FOUND)


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
    }
)
def launch(
    context: typer.Context,
    target: Annotated[str, typer.Argument(metavar="PLAN_OR_CONFIG", help="plan.json, or a DeepSpeed JSON.")],
    script: Annotated[str, typer.Argument(help="The training script; what follows it is its own.")],
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", min=1, help="Processes on this machine; default: the plan's, else GPUs, else 2."),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Another batch than the plan's is an error.")] = False,
    script_config: Annotated[
        bool, typer.Option("--script-config", help="Keep the script's own configuration.")
    ] = False,
    engine: Annotated[EngineName | None, typer.Option("--engine")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder for run.json; default: a temporary one.")
    ] = None,
    format: Annotated[TextOrJson, typer.Option("--format")] = TextOrJson.text,
) -> None:
    """Run a DeepSpeed training script, unmodified, on the bundled runtime; print its memory, predicted beside measured.

    Options go before PLAN_OR_CONFIG. Exit code: that of the first rank that failed; 2 for what we refuse.
    """
    if engine is EngineName.deepspeed:
        raise Problem(
            "launch --engine deepspeed is not carried out yet; run the script with DeepSpeed's own launcher and the plan's "
            "ds_config.json"
        )
    from dsplan.runtime import launcher

    code = launcher.launch(
        Path(target),
        Path(script),
        context.args,
        ranks=ranks,
        strict=strict,
        script_config=script_config,
        run_dir=output,
        as_json=format is TextOrJson.json,
    )
    raise typer.Exit(code)


@app.command()
def explain(rule: Annotated[str, typer.Argument(help="A rule id, for example DSP102.")]) -> None:
    """Print the page of one rule."""
    from dsplan.planner.rules import RULES
    from dsplan.reports import rule_page

    found = RULES.get(rule.upper())
    if found is None:
        raise Problem(f"{rule} is no rule; dsplan rules lists all {len(RULES)}")
    typer.echo(rule_page.page(found))


@app.command()
def rules(format: Annotated[TextOrJson, typer.Option("--format")] = TextOrJson.text) -> None:
    """List the rules of lint."""
    from dsplan.planner.rules import RULES
    from dsplan.reports import rule_page

    everything = list(RULES.values())
    typer.echo(rule_page.listing_json(everything) if format is TextOrJson.json else rule_page.listing(everything))


@app.command(hidden=True)
def docs(
    check: Annotated[bool, typer.Option("--check", help="Only say whether they are current.")] = False,
) -> None:
    """Write the generated pages of docs/ (from a checkout)."""
    from dsplan.planner.rules import RULES
    from dsplan.reports import rule_page

    page = Path("docs/rules.md")
    text = rule_page.document(list(RULES.values()))
    if check:
        current = page.is_file() and page.read_text("utf-8") == text
        if not current:
            _error(f"{page} is not current; run make docs")
        raise typer.Exit(CLEAN if current else FOUND)
    page.write_text(text, "utf-8")


def main() -> None:
    """Entry point: every Problem becomes one line on stderr and exit code 2."""
    try:
        code = app(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else CLEAN)
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            typer.echo(error.format_message(), err=True)
            sys.exit(COULD_NOT_RUN)
        command = f"{error.ctx.command_path} " if error.ctx else "dsplan "
        _error(f"{error.format_message().rstrip('.')}; {command}--help shows what there is")
        sys.exit(COULD_NOT_RUN)
    except Problem as problem:
        if problem.user_traceback:
            sys.stderr.write(problem.user_traceback.rstrip("\n") + "\n")
        _error(str(problem))
        sys.exit(COULD_NOT_RUN)
    except KeyboardInterrupt:
        _error("interrupted")
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output went away
        sys.stderr.close()
        sys.exit(COULD_NOT_RUN)
    except Exception as error:
        if os.environ.get("DSPLAN_TRACEBACK"):
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}:{frame.lineno}"
        _error(f"a fault of dsplan itself: {type(error).__name__}: {error} ({place}); DSPLAN_TRACEBACK=1 shows more")
        sys.exit(COULD_NOT_RUN)


def _error(text: str) -> None:
    typer.echo(f"dsplan: error: {text}", err=True)


def _note(text: str) -> None:
    typer.echo(f"dsplan: note: {text}", err=True)


class _progress:
    """A spinner on stderr for what takes over two seconds; nothing where stderr is no terminal."""

    def __enter__(self) -> Any:
        self._status: Any = None
        if not sys.stderr.isatty():
            return lambda text: None
        from rich.console import Console

        self._status = Console(stderr=True).status("starting")
        self._status.start()
        return self._status.update

    def __exit__(self, *exception: object) -> None:
        if self._status is not None:
            self._status.stop()


if __name__ == "__main__":
    main()
