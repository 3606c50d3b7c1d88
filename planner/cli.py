"""The command line's entry: finds the command, and makes one line and an exit code of what goes wrong."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from dsplan.planner.commands import COMMANDS
from dsplan.planner.terminal import CLEAN, COULD_NOT_RUN, error
from dsplan.schemas.problem import Problem

_UsageError: Any = typer.BadParameter.__bases__[0]
"""Click's, from wherever typer has it: its own copy, or the package."""


def app(arguments: Sequence[str], **options: Any) -> Any:
    """Runs the command that the arguments name. Imports that one alone; all of them for help and for unknown names."""
    built = typer.Typer(
        name="dsplan",
        help="Audit, plan and run PyTorch training that is configured by a DeepSpeed JSON.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    built.callback()(_group)
    wanted = arguments[0] if arguments else ""
    for name in [wanted] if wanted in COMMANDS else COMMANDS:
        built.command(name, **COMMANDS[name])(getattr(import_module(f"dsplan.planner.commands.{name}"), name))
    return built(list(arguments), **options)


def _group() -> None:
    """Keeps the name of the command on the command line where only one is registered."""


def main() -> None:
    """Entry point: every Problem becomes one line on stderr and exit code 2."""
    try:
        code = app(sys.argv[1:], standalone_mode=False)
        sys.exit(code if isinstance(code, int) else CLEAN)
    except _UsageError as usage:
        if type(usage).__name__ == "NoArgsIsHelpError":
            typer.echo(usage.format_message(), err=True)
            sys.exit(COULD_NOT_RUN)
        command = f"{usage.ctx.command_path} " if usage.ctx else "dsplan "
        error(f"{usage.format_message().rstrip('.')}; {command}--help shows what there is")
        sys.exit(COULD_NOT_RUN)
    except Problem as problem:
        if problem.user_traceback:
            sys.stderr.write(problem.user_traceback.rstrip("\n") + "\n")
        error(str(problem))
        sys.exit(COULD_NOT_RUN)
    except KeyboardInterrupt:
        error("interrupted")
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output went away
        sys.stderr.close()
        sys.exit(COULD_NOT_RUN)
    except Exception as fault:
        if os.environ.get("DSPLAN_TRACEBACK"):
            raise
        frame = traceback.extract_tb(fault.__traceback__)[-1]
        place = f"{Path(frame.filename).name}:{frame.lineno}"
        error(f"a fault of dsplan itself: {type(fault).__name__}: {fault} ({place}); DSPLAN_TRACEBACK=1 shows more")
        sys.exit(COULD_NOT_RUN)


if __name__ == "__main__":
    main()
