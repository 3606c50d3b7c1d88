"""dsplan launch: run a script under a plan or a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from dsplan.planner.options import EngineName, TextOrJson
from dsplan.schemas.problem import Problem


def launch(
    context: typer.Context,
    target: Annotated[str, typer.Argument(metavar="PLAN_OR_CONFIG", help="plan.json, or a DeepSpeed JSON.")],
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT [ARGS]...", help="The training script; what follows it is its own.")
    ],
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
    backend: Annotated[
        str | None,
        typer.Option(
            "--backend", help="nccl, gloo or mpi, whatever the script asks for; default: nccl where there are GPUs."
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", metavar="SECONDS", help="How long a collective may wait; default: PyTorch's."),
    ] = None,
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", min=0, help="How often ranks may be started again after a failure.")
    ] = 0,
    min_ranks: Annotated[
        int | None,
        typer.Option("--min-ranks", min=1, help="Start again without the ranks that were killed, down to this many."),
    ] = None,
    format: Annotated[TextOrJson, typer.Option("--format")] = TextOrJson.text,
) -> None:
    """Run a DeepSpeed training script, unmodified, on the bundled runtime; print its memory, predicted beside measured.

    Options go before PLAN_OR_CONFIG. Exit code: that of the first rank that failed; 2 for what we refuse.
    """
    if target.startswith("-"):
        raise Problem(
            f"launch has no option {target}; --ranks N sets the number of processes, and launch --help shows the rest"
        )
    if engine is EngineName.deepspeed:
        raise Problem(
            "launch --engine deepspeed is not carried out yet; run the script with DeepSpeed's own launcher and the plan's "
            "ds_config.json"
        )
    if timeout is not None and not timeout > 0:
        raise Problem(f"--timeout is {timeout:g}, but must be a number of seconds above 0")
    if min_ranks is not None and not max_restarts:
        raise Problem("--min-ranks says how many ranks to start again with; give --max-restarts too")
    from dsplan.runtime.launching import launcher

    code = launcher.launch(
        Path(target),
        Path(script),
        context.args,
        ranks=ranks,
        strict=strict,
        script_config=script_config,
        run_dir=output,
        as_json=format is TextOrJson.json,
        backend=backend,
        timeout_seconds=timeout,
        restarts=launcher.Restarts(most=max_restarts, min_ranks=min_ranks),
    )
    raise typer.Exit(code)
