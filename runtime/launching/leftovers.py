"""Ends what ranks started and left behind: known by the environment that it was started with."""

from __future__ import annotations

import contextlib
import os

import psutil

PATIENCE_SECONDS = 1
"""How long a process that is told to end may take before it is killed."""


def end_leftovers(variable: str, value: str) -> None:
    """End every process of this user whose environment began with variable=value, but for this one and those above it.

    What was started with another environment is not found.
    """
    spared = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    for _ in range(3):  # one may start another while it ends
        found = [
            process for process in psutil.process_iter() if process.pid not in spared and _has(process, variable, value)
        ]
        if not found:
            return
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.terminate()
        _, alive = psutil.wait_procs(found, timeout=PATIENCE_SECONDS)
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(alive, timeout=PATIENCE_SECONDS)


def _has(process: psutil.Process, variable: str, value: str) -> bool:
    try:
        return process.environ().get(variable) == value
    except (psutil.Error, OSError):  # another user's, or gone
        return False
