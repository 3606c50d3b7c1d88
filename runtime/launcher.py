"""dsplan launch: starts the ranks with torchrun's agent, and tells what became of them."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dsplan.reports.run_table import as_text
from dsplan.runtime.orders import VARIABLE, Orders
from dsplan.schemas import native_support
from dsplan.schemas.jsonfile import load_config_file
from dsplan.schemas.ledger import Ledger
from dsplan.schemas.plan import PlanFile
from dsplan.schemas.problem import Problem

PATIENCE_SECONDS = 5
"""How long a rank that is told to end may take before it is killed."""


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
) -> int:
    """Run the script on every rank under TARGET, a plan.json or a DeepSpeed config; the exit code for the shell.

    That is the code of the first rank that failed (128 + n for signal n), or 2 where the engine refused. Writes run.json
    into run_dir (default: here) and prints predicted beside measured. Problem where nothing could be started.
    """
    raw = load_config_file(target)
    plan = _plan(raw, target)
    config = plan.ds_config if plan else raw
    if plan and plan.recompute != "none":
        config = {**config, "dsplan": {"recompute": plan.recompute, **config.get("dsplan", {})}}
    if not script.is_file():
        raise Problem(f"{script}: no such script")
    if not script_config:
        _refuse(config, target)
    count = _settle_ranks(ranks, plan, target)
    with tempfile.TemporaryDirectory(prefix="dsplan_") as folder:
        orders = Orders(
            config=None if script_config else config,
            source=str(target),
            strict=strict,
            folder=folder,
            launcher_pid=os.getpid(),
        )
        with _environment({VARIABLE: str(orders.write()), "OMP_NUM_THREADS": _threads(count)}):
            exit_codes, code = _run_ranks(count, [str(script), *script_args])
        if code:
            return _explain_failure(Path(folder), exit_codes, code)
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
    path = (run_dir or Path()) / "run.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(run, indent=1) + "\n", "utf-8")
    print(as_text((predicted or {}).get("memory"), ledgers), flush=True)
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


def _refuse(config: dict[str, Any], target: Path) -> None:
    found = [(pointer, text) for pointer, level, text in native_support.reasons(config) if level == "error"]
    if found:
        lines = "; ".join(f"{pointer.strip('/').replace('/', '.')}: {text}" for pointer, text in found)
        raise Problem(f"{target}: the native engine cannot carry this out: {lines}")


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


def _run_ranks(count: int, command: list[str]) -> tuple[dict[int, int], int]:
    """Exit codes of the ranks that failed, and the code that stands for all: 0 where none did."""
    from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.rendezvous import RendezvousParameters, registry

    class Agent(LocalElasticAgent):
        """torchrun's agent, with less patience for ranks that do not end when told to."""

        def _stop_workers(self, worker_group: WorkerGroup) -> None:
            self._shutdown(timeout=PATIENCE_SECONDS)

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the failure is told below, once
    rendezvous = registry.get_rendezvous_handler(
        RendezvousParameters(
            backend="c10d",
            endpoint="localhost:0",
            run_id=uuid.uuid4().hex,
            min_nodes=1,
            max_nodes=1,
            local_addr="localhost",
        )
    )
    spec = WorkerSpec(
        role="rank",
        local_world_size=count,
        entrypoint=sys.executable,
        args=("-m", "dsplan.runtime.bootstrap", *command),
        rdzv_handler=rendezvous,
        max_restarts=0,
        monitor_interval=0.1,
        local_addr="localhost",
    )
    agent = Agent(spec, DefaultLogsSpecs(), start_method="spawn", exit_barrier_timeout=5)
    try:
        result = agent.run()
    except SignalException as stop:
        return {}, 128 + int(stop.sigval)
    finally:
        rendezvous.shutdown()
    failed = {rank: failure.exitcode for rank, failure in result.failures.items()}
    return failed, (1 if result.is_failed() else 0)


def _explain_failure(folder: Path, exit_codes: dict[int, int], code: int) -> int:
    """Print why the launch failed, the rank at fault by name, and give the exit code."""
    told = {}
    for path in folder.glob("failure_*.json"):
        told[int(path.stem.removeprefix("failure_"))] = json.loads(path.read_text("utf-8"))
    if not exit_codes:
        print(f"dsplan: stopped by {signal.Signals(code - 128).name}", file=sys.stderr, flush=True)
        return code
    # A rank that was killed leaves no word, and its death is what the others then complain of.
    killed = [rank for rank, rank_code in exit_codes.items() if rank_code < 0 and rank_code != -signal.SIGTERM]
    spoke = [rank for rank in told if exit_codes.get(rank) != -signal.SIGTERM]  # SIGTERM is what the others were sent
    first = min(killed) if killed else min(spoke, key=lambda rank: told[rank]["time"], default=min(exit_codes))
    exit_code = exit_codes.get(first, 1)
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        hint = " (out of memory on the host, perhaps)" if exit_code == -signal.SIGKILL else ""
        print(f"dsplan: error: rank {first} was killed by {name}{hint}", file=sys.stderr, flush=True)
        return 128 - exit_code
    if first in told and told[first]["refused"]:
        print(f"dsplan: error: {told[first]['text']}", file=sys.stderr, flush=True)
        return exit_code
    if first in told and told[first]["text"]:
        text = told[first]["text"].rstrip()
        print(f"rank {first} failed:\n{text}", file=sys.stderr)
    print(f"dsplan: error: rank {first} ended with exit code {exit_code}", file=sys.stderr, flush=True)
    return exit_code


def _record(folder: Path, rank: int) -> dict[str, Any]:
    path = folder / f"record_{rank}.json"
    if not path.exists():
        return {"rank": rank, "ledger": None, "note": f"no record of rank {rank}"}
    record: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return {"rank": rank, **record}
