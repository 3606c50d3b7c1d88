"""A checkpoint that is written while training goes on, by a thread of each rank over copies of its own.

The ranks tell each other the outcome through the process group's store, not by collectives: those are the training's, and
the group may be destroyed before the last checkpoint is written. The process ends when it is.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable

import torch.distributed as dist
from dsplan.runtime.groups import note
from dsplan.schemas.problem import Problem
from torch.distributed.constants import default_pg_timeout

_POLL_SECONDS = 0.02
_unfinished: list[Background] = []


class Background:
    """One checkpoint on its way. write gives this rank's part as JSON, or a line on why there is none; complete is what rank
    0 does with all parts once they are told. Each gives its line on what went wrong."""

    def __init__(
        self,
        tag: str,
        key: str,
        write: Callable[[], tuple[str, str | None]],
        complete: Callable[[list[tuple[str, str | None]]], str | None],
    ):
        self.tag = tag
        self.failure: str | None = None
        self._store = dist.distributed_c10d._get_default_store()
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._key, self._write, self._complete = key, write, complete
        self._thread = threading.Thread(
            target=self._run, name=f"dsplan saves {tag}"
        )  # no daemon: the process waits for it
        _unfinished.append(self)
        self._thread.start()

    def wait(self) -> str | None:
        """What went wrong on this rank, or, on rank 0, on any."""
        self._thread.join()
        if self in _unfinished:
            _unfinished.remove(self)
        return self.failure

    def _run(self) -> None:
        part, line = self._write()
        self.failure = line
        if self._world_size > 1:
            self._store.set(f"{self._key}/{self._rank}", json.dumps([part, line]))
        if self._rank > 0:
            return
        parts = [(part, line)]
        for rank in range(1, self._world_size):
            parts.append(self._told_by(rank))
        self.failure = self._complete(parts)
        if self.failure is not None:
            note(self.failure)  # the next call that can raise it may be far, or never come

    def _told_by(self, rank: int) -> tuple[str, str | None]:
        key = f"{self._key}/{rank}"
        until = time.monotonic() + default_pg_timeout.total_seconds()
        while True:
            try:
                if self._store.check([key]):
                    part, line = json.loads(self._store.get(key))
                    self._store.delete_key(key)
                    return part, line
            except dist.DistError as error:
                return "", f"rank {rank} cannot be asked any more ({str(error).partition(chr(10))[0]})"
            if time.monotonic() > until:
                return "", f"rank {rank} did not write its part within {default_pg_timeout.total_seconds():g} s"
            time.sleep(_POLL_SECONDS)


def wait_for_all() -> None:
    """At the end of the script: all that is on its way is written. Problem where one could not be."""
    lines = [line for line in [job.wait() for job in list(_unfinished)] if line is not None]
    if lines:
        raise Problem(lines[0])
