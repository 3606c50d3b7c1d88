"""dsplan launch: starts the ranks with torchrun's agent, and tells what became of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dsplan.reports.run_table import as_text
from dsplan.runtime.launching.agent import run_until_done
from dsplan.runtime.launching.failures import Failure, read_failure
from dsplan.runtime.launching.leftovers import end_leftovers, watched
from dsplan.runtime.launching.orders import VARIABLE, Orders, read_batch
from dsplan.schemas.jsonfile import load_config_file
from dsplan.schemas.ledger import Ledger
from dsplan.schemas.plan import PlanFile
from dsplan.schemas.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Restarts:
    """How often ranks may be started again after a failure. With min_ranks below their number, killed ones are not replaced."""

    most: int = 0
    min_ranks: int | None = None


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
    backend: str | None = None,
    timeout_seconds: float | None = None,
    restarts: Restarts = Restarts(),
) -> int:
    """Run the script on every rank under TARGET, a plan.json or a DeepSpeed config; the exit code for the shell.

    That is the code of the first rank that failed (128 + n for signal n), or 2 where the engine refused. Writes run.json
    into run_dir (default: a temporary folder) and prints predicted beside measured, or run.json with as_json. Problem
    where nothing could be started.
    """
    if target.suffix == ".py" and target.is_file():
        raise Problem(f"{target}: is a script, but the plan or DeepSpeed JSON goes first: launch CONFIG {target}")
    raw = load_config_file(target)
    plan = _plan(raw, target)
    config = plan.ds_config if plan else raw
    if plan and plan.recompute != "none":
        config = {**config, "dsplan": {"recompute": plan.recompute, **config.get("dsplan", {})}}
    if not script.is_file():
        raise Problem(f"{script}: no such script")
    _check_backend(backend)
    if not script_config:
        from dsplan.runtime.refusals import judge  # with torch, and so after what is quick to say

        judge(config, str(target), whole=False).accepted()
    count = _settle_ranks(ranks, plan, target)
    if restarts.min_ranks is not None and restarts.min_ranks > count:
        raise Problem(f"--min-ranks is {restarts.min_ranks}, but {count} ranks would be started; at most {count}")
    if run_dir is not None:
        _make_writable(run_dir)
    orders = Orders(
        config=None if script_config else config,
        source=str(target),
        model_params=plan.model.get("params") if plan else None,
        strict=strict,
        folder="",
        launcher_pid=os.getpid(),
        backend=backend,
        timeout_seconds=timeout_seconds,
    )
    with tempfile.TemporaryDirectory(prefix="dsplan_") as root, watched(VARIABLE, root):
        failure, records = _run(orders, Path(root), count, [str(script), *script_args], restarts)
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
        "failure": {"exit_code": failure.exit_code, "reason": failure.line} if failure else None,
    }
    text = json.dumps(run, indent=1)
    if failure is None or run_dir is not None:
        path = (run_dir or Path(tempfile.mkdtemp(prefix="dsplan_run_"))) / "run.json"
        path.write_text(text + "\n", "utf-8")
    if failure is not None:
        for record in records if held else ():
            if record["ledger"] is None:
                print(f"dsplan: no record of rank {record['rank']}", file=sys.stderr)
        _tell(failure, "" if failure.stopped else "error: ")
        return failure.exit_code
    for record in records:
        if "note" in record:
            print(f"dsplan: {record['note']}: it left without ending the script (os._exit)", file=sys.stderr)
    print(text if as_json else _table(predicted or {}, ledgers, records), flush=True)
    print(f"dsplan: the run's record is {path}", file=sys.stderr, flush=True)
    return 0


def _table(predicted: dict[str, Any], ledgers: list[Ledger | None], records: list[dict[str, Any]]) -> str:
    return as_text(
        predicted.get("memory"),
        ledgers,
        steps=[record.get("step_seconds") for record in records],
        devices=[record.get("device") for record in records],
        predicted_step=(predicted.get("time") or {}).get("step_seconds"),
    )


def _run(
    orders: Orders, root: Path, count: int, arguments: list[str], restarts: Restarts
) -> tuple[Failure | None, list[dict[str, Any]]]:
    """Start the ranks until they end well or may not be started again: how the last start failed, and its records."""
    bootstrap = str(Path(__file__).with_name("bootstrap.py"))
    for attempt in range(restarts.most + 1):
        folder = root / f"start_{attempt}"
        folder.mkdir()
        orders = replace(orders, folder=str(folder))
        orders.write()
        with _environment({VARIABLE: str(orders.path), "OMP_NUM_THREADS": _threads(count)}):
            outcome = run_until_done(count, [bootstrap, *arguments], attempt)
        records = [_record(folder, rank) for rank in range(count)]
        if outcome.good:
            return None, records
        end_leftovers(VARIABLE, str(root))
        failure = read_failure(folder, outcome)
        if attempt == restarts.most or not failure.may_pass:
            break
        batch = read_batch(folder)
        orders = replace(orders, kept_batch=orders.kept_batch or batch)
        killed = sum(exit_code < 0 for exit_code in outcome.exit_codes.values())
        count = next_ranks(count, killed, _gpus_now(), restarts.min_ranks, orders.kept_batch)
        _tell(failure, "", f"; restart {attempt + 1} of {restarts.most}, with {_ranks(count)}")
    return failure, records


def next_ranks(count: int, killed: int, gpus: int | None, min_ranks: int | None, batch: tuple[int, int] | None) -> int:
    """How many ranks to start after a failure: as many as before, and fewer where that is allowed and called for.

    gpus: what the machine still shows, None without any. batch: (global batch, micro-batch), which are kept: of the counts
    from min_ranks on the largest at which accumulation is whole.
    """
    wanted = max(min_ranks or count, count - killed)
    if gpus is not None:
        wanted = min(wanted, gpus)
    for fewer in range(wanted, (min_ranks or count) - 1, -1):
        if batch is None or batch[0] % (batch[1] * fewer) == 0:
            return fewer
    return count


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"


def _gpus_now() -> int | None:
    """Asked in a process of its own: torch remembers what it saw first, and one may have failed since."""
    import torch

    if not torch.cuda.is_available():
        return None
    answer = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"], capture_output=True, text=True
    ).stdout.strip()
    return int(answer) if answer.isdigit() else None


def _tell(failure: Failure, level: str, rest: str = "") -> None:
    if failure.detail:
        print(failure.detail, file=sys.stderr)
    print(f"dsplan: {level}{failure.line}{rest}", file=sys.stderr, flush=True)


def _check_backend(backend: str | None) -> None:
    """Before any rank starts: what a script may leave to torch, an order may not."""
    if backend is None:
        return
    import torch
    from dsplan.runtime.groups import available_backend

    if backend == "nccl" and not torch.cuda.is_available():
        raise Problem("--backend nccl needs a GPU, and torch sees none on this machine; use gloo, or leave it out")
    available_backend(backend)


def _plan(raw: dict[str, Any], target: Path) -> PlanFile | None:
    """The plan, where the file has a layout. Problem where it is one that cannot be run."""
    if "layout" not in raw:
        return None
    try:
        plan = PlanFile.from_json(raw)
    except ValueError as error:
        raise Problem(f"{target}: {error}") from error
    unlike = plan.unlike_config()
    if unlike:
        raise Problem(f"{target}: {'; '.join(unlike)}; launch runs ds_config: change both alike, or tune again")
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


def _record(folder: Path, rank: int) -> dict[str, Any]:
    path = folder / f"record_{rank}.json"
    try:
        record: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):  # none, or killed while it was written
        return {"rank": rank, "ledger": None, "note": f"no record of rank {rank}"}
    return {"rank": rank, **record}
