"""run_ranks: a function on n gloo ranks, in spawned processes that are kept for the next call."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

LIMIT_SECONDS = 120
_pools: dict[int, list[tuple[BaseProcess, Connection]]] = {}


def run_ranks(num_ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """function(*args) on every rank of a process group; what each returned, by rank.

    function must be a module's (spawned processes find it by name); what it takes and returns is pickled. One thread
    each. AssertionError with the traceback of each rank that raised, or that said nothing within 120 s.
    """
    if num_ranks not in _pools:
        _pools[num_ranks] = _start(num_ranks)
    pool = _pools[num_ranks]
    failures: dict[int, str] = {}
    results: list[Any] = [None] * num_ranks
    with tempfile.TemporaryDirectory() as folder:
        for _, connection in pool:
            connection.send((str(Path(folder) / "store"), function, args))
        for rank, (process, connection) in enumerate(pool):
            # A rank that waits for one that failed never answers: give it no more time once a failure is known.
            if not connection.poll(LIMIT_SECONDS if not failures else 5):
                failures[rank] = f"no answer within {LIMIT_SECONDS} s (alive: {process.is_alive()})"
                continue
            try:
                good, value = connection.recv()
            except EOFError:
                good, value = False, f"the process ended with exit code {process.exitcode}"
            if good:
                results[rank] = value
            else:
                failures[rank] = value
    if failures:
        _stop(num_ranks)
        raise AssertionError("\n".join(f"rank {rank}:\n{text}" for rank, text in failures.items()))
    return results


def _start(num_ranks: int) -> list[tuple[BaseProcess, Connection]]:
    context = multiprocessing.get_context("spawn")
    pool: list[tuple[BaseProcess, Connection]] = []
    for rank in range(num_ranks):
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(rank, num_ranks, theirs), daemon=True)
        process.start()
        theirs.close()
        pool.append((process, ours))
    return pool


@atexit.register
def _stop_all() -> None:
    for num_ranks in list(_pools):
        _stop(num_ranks)


def _stop(num_ranks: int) -> None:
    for process, connection in _pools.pop(num_ranks):
        connection.close()
        process.kill()
        process.join()


def _serve(rank: int, num_ranks: int, connection: Connection) -> None:
    os.environ |= {"OMP_NUM_THREADS": "1", "LOCAL_RANK": str(rank)}
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            store, function, args = connection.recv()
        except EOFError:
            return
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=num_ranks,
                timeout=timedelta(seconds=LIMIT_SECONDS),
            )
            answer = (True, function(*args))
            dist.destroy_process_group()
        except BaseException:
            answer = (False, traceback.format_exc())
        connection.send(answer)
