"""The command line's entry: finds the command, and makes one line and an exit code of what goes wrong."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from dsplan.planner.quick import quick_lint
from dsplan.planner.terminal import CLEAN, COULD_NOT_RUN, error, version
from dsplan.schemas.problem import Problem


def app(arguments: Sequence[str], **options: Any) -> Any:
    """Runs the command that the arguments name. Imports that one alone; all of them for help and for unknown names."""
    import typer
    from dsplan.planner.commands import COMMANDS

    built = typer.Typer(
        name="dsplan",
        help="Audit, plan and run PyTorch training that is configured by a DeepSpeed JSON.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    def group(
        wanted: bool = typer.Option(False, "--version", is_eager=True, callback=_show_version, help="Say which it is."),
    ) -> None:
        """Keeps the name of the command on the command line where only one is registered."""

    built.callback()(group)
    wanted = arguments[0] if arguments else ""
    for name in [wanted] if wanted in COMMANDS else COMMANDS:
        command = getattr(import_module(f"dsplan.planner.commands.{name}"), name)
        if isinstance(command, typer.Typer):  # it has commands of its own
            built.add_typer(command, name=name)
        else:
            built.command(name, **COMMANDS[name])(command)
    return built(list(arguments), **options)


def _show_version(wanted: bool) -> None:
    if wanted:
        import typer

        typer.echo(f"dsplan {version() or 'of a source tree'}")
        raise typer.Exit(CLEAN)


def _read_by_typer(arguments: Sequence[str]) -> int:
    """The exit code of any command line. A line that cannot be read is one line on stderr."""
    import typer

    usage_error: Any = typer.BadParameter.__bases__[
        0
    ]  # click's, from wherever typer has it: its own copy, or the package
    try:
        code = app(arguments, standalone_mode=False)
        if code == 130:  # typer's own answer to Ctrl-C, given without a word
            error("interrupted")
        return code if isinstance(code, int) else CLEAN
    except usage_error as usage:
        if type(usage).__name__ == "NoArgsIsHelpError":
            typer.echo(usage.format_message(), err=True)
            return COULD_NOT_RUN
        command = f"{usage.ctx.command_path} " if usage.ctx else "dsplan "
        error(f"{usage.format_message().rstrip('.')}; {command}--help shows what there is")
        return COULD_NOT_RUN


def _give_up_output() -> None:
    """What is still to be written goes nowhere, lest Python complains of it at its end."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> None:
    """Entry point: every Problem becomes one line on stderr and exit code 2."""
    sys.stdout, sys.stderr = sys.stdout or io.StringIO(), sys.stderr or io.StringIO()  # None where closed by >&-
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal or file in another encoding than UTF-8
            stream.reconfigure(errors="backslashreplace")
    try:
        code = quick_lint(sys.argv[1:])
        code = _read_by_typer(sys.argv[1:]) if code is None else code
        sys.stdout.flush()  # here, where what goes wrong has its line
        sys.exit(code)
    except Problem as problem:
        if problem.user_traceback:
            sys.stderr.write(problem.user_traceback.rstrip("\n") + "\n")
        error(str(problem))
        sys.exit(COULD_NOT_RUN)
    except KeyboardInterrupt:
        error("interrupted")
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output went away
        _give_up_output()
        sys.exit(COULD_NOT_RUN)
    except Exception as fault:
        if os.environ.get("DSPLAN_TRACEBACK"):
            raise
        if isinstance(fault, OSError) and fault.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            _give_up_output()
            error(f"the output cannot be written ({fault.strerror})")
            sys.exit(COULD_NOT_RUN)
        import traceback
        from pathlib import Path

        frame = traceback.extract_tb(fault.__traceback__)[-1]
        place = f"{Path(frame.filename).name}:{frame.lineno}"
        error(f"a fault of dsplan itself: {type(fault).__name__}: {fault} ({place}); DSPLAN_TRACEBACK=1 shows more")
        sys.exit(COULD_NOT_RUN)


if __name__ == "__main__":
    main()
