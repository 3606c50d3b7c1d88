"""dsplan launch: starts the ranks with torchrun's agent, and tells what became of them."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dsplan.reports.run_table import as_text
from dsplan.runtime.launching.agent import Outcome, run_until_done
from dsplan.runtime.launching.leftovers import end_leftovers
from dsplan.runtime.launching.orders import VARIABLE, Orders
from dsplan.schemas.jsonfile import load_config_file
from dsplan.schemas.ledger import Ledger
from dsplan.schemas.plan import PlanFile
from dsplan.schemas.problem import Problem


def launch(
    target: Path,
    script: Path,
    script_args: list[str],
    *,
    ranks: int | None = None,
    strict: bool = False,
    script_config: bool = False,
    run_dir: Path | None = None,
    predicted: dict[str, Any] | None = None,
    as_json: bool = False,
) -> int:
    """Run the script on every rank under TARGET, a plan.json or a DeepSpeed config; the exit code for the shell.

    That is the code of the first rank that failed (128 + n for signal n), or 2 where the engine refused. Writes run.json
    into run_dir (default: a temporary folder) and prints predicted beside measured, or run.json with as_json. Problem
    where nothing could be started.
    """
    raw = load_config_file(target)
    plan = _plan(raw, target)
    config = plan.ds_config if plan else raw
    if plan and plan.recompute != "none":
        config = {**config, "dsplan": {"recompute": plan.recompute, **config.get("dsplan", {})}}
    if not script.is_file():
        raise Problem(f"{script}: no such script")
    if not script_config:
        from dsplan.runtime.refusals import judge  # with torch, and so after what is quick to say

        judge(config, str(target), whole=False).accepted()
    count = _settle_ranks(ranks, plan, target)
    if run_dir is not None:
        _make_writable(run_dir)
    with tempfile.TemporaryDirectory(prefix="dsplan_") as folder:
        orders = Orders(
            config=None if script_config else config,
            source=str(target),
            strict=strict,
            folder=folder,
            launcher_pid=os.getpid(),
        )
        orders.write()
        with _environment({VARIABLE: str(orders.path), "OMP_NUM_THREADS": _threads(count)}):
            bootstrap = Path(__file__).with_name("bootstrap.py")
            outcome = run_until_done(count, [str(bootstrap), str(script), *script_args])
        if not outcome.good:
            end_leftovers(VARIABLE, str(orders.path))
            return _explain_failure(Path(folder), outcome)
        records = [_record(Path(folder), rank) for rank in range(count)]
    if predicted is None and plan:
        predicted = plan.predicted
    ledgers = [Ledger.from_json(record["ledger"]) if record["ledger"] else None for record in records]
    held = [ledger for ledger in ledgers if ledger is not None]
    worst = max(held, key=lambda ledger: ledger.allocated_bytes) if held else None
    run = {
        "version": 1,
        "predicted": predicted,
        "measured": worst.to_json() if worst else None,
        "ranks": records,
    }
    text = json.dumps(run, indent=1)
    path = (run_dir or Path(tempfile.mkdtemp(prefix="dsplan_run_"))) / "run.json"
    path.write_text(text + "\n", "utf-8")
    print(text if as_json else as_text((predicted or {}).get("memory"), ledgers), flush=True)
    print(f"dsplan: the run's record is {path}", file=sys.stderr, flush=True)
    return 0


def _plan(raw: dict[str, Any], target: Path) -> PlanFile | None:
    """The plan, where the file has a layout. Problem where it is one that cannot be run."""
    if "layout" not in raw:
        return None
    try:
        plan = PlanFile.from_json(raw)
    except ValueError as error:
        raise Problem(f"{target}: {error}") from error
    if plan.engine != "native":
        raise Problem(f"{target}: is a plan for engine {plan.engine}; tune with --engine native to launch it here")
    layout = plan.layout
    for name in ("tp", "pp", "sp"):
        if getattr(layout, name) > 1:
            raise Problem(
                f"{target}: {name} is {getattr(layout, name)}, but the native engine carries out {name} 1 only"
            )
    if layout.dp_replicate > 1 and layout.dp_shard > 1:
        raise Problem(
            f"{target}: dp {layout.dp_replicate} x {layout.dp_shard} (hybrid sharding) is not carried out yet"
        )
    return plan


def _make_writable(run_dir: Path) -> None:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = "is no folder" if run_dir.exists() else f"cannot be made ({error.strerror})"
        raise Problem(f"{run_dir}: {what}, so run.json cannot be written there; name a folder with -o") from error
    if not os.access(run_dir, os.W_OK | os.X_OK):
        raise Problem(f"{run_dir}: run.json cannot be written there (no permission); name another folder with -o")


def _settle_ranks(ranks: int | None, plan: PlanFile | None, target: Path) -> int:
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if ranks is None:
        ranks = plan.layout.ranks if plan else gpus or 2
    if ranks < 1:
        raise Problem(f"{ranks} ranks cannot be started; at least 1")
    if plan and plan.layout.ranks != ranks:
        raise Problem(
            f"{target}: is a plan for {plan.layout} = {plan.layout.ranks} ranks, but {ranks} would be started"
        )
    if gpus and ranks > gpus:
        raise Problem(f"{ranks} ranks need a GPU each, but this machine shows {gpus}")
    return ranks


def _threads(ranks: int) -> str:
    return os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // ranks))


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


def _explain_failure(folder: Path, outcome: Outcome) -> int:
    """Print why the launch failed, the rank at fault by name, and give the exit code."""
    if outcome.stopped_by is not None:
        print(f"dsplan: stopped by {outcome.stopped_by.name}", file=sys.stderr, flush=True)
        return 128 + outcome.stopped_by
    told = {}
    for rank in outcome.exit_codes:
        path = folder / f"failure_{rank}.json"
        if path.exists():
            told[rank] = json.loads(path.read_text("utf-8"))
    # A rank that was killed leaves no word, and its death is what the others then complain of.
    killed = [rank for rank, exit_code in outcome.exit_codes.items() if exit_code < 0]
    first = min(killed) if killed else min(told, key=lambda rank: told[rank]["time"], default=min(outcome.exit_codes))
    exit_code = outcome.exit_codes[first]
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        hint = " (out of memory on the host, perhaps)" if exit_code == -signal.SIGKILL else ""
        print(f"dsplan: error: rank {first} was killed by {name}{hint}", file=sys.stderr, flush=True)
        return 128 - exit_code
    record = told.get(first, {"text": "", "refused": False})
    if record["refused"]:
        if record["cause"]:
            print(f"rank {first} failed:\n{record['cause'].rstrip()}", file=sys.stderr)
        print(f"dsplan: error: {record['text']}", file=sys.stderr, flush=True)
        return exit_code
    if record["text"]:
        print(f"rank {first} failed:\n{record['text'].rstrip()}", file=sys.stderr)
    others = " and ".join(f"rank {rank}" for rank in outcome.left)
    after = f", after {others} had left with code 0; all ranks must make the same steps" if others else ""
    print(f"dsplan: error: rank {first} ended with exit code {exit_code}{after}", file=sys.stderr, flush=True)
    return exit_code


def _record(folder: Path, rank: int) -> dict[str, Any]:
    path = folder / f"record_{rank}.json"
    if not path.exists():
        return {"rank": rank, "ledger": None, "note": f"no record of rank {rank}"}
    record: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return {"rank": rank, **record}
