"""Ends what ranks started and left behind, known by the environment that it was started with; and a watcher that does so
where the launcher itself is killed.

python .../runtime/launching/leftovers.py VARIABLE FOLDER       watch until standard input ends
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

PATIENCE_SECONDS = 1
"""How long a process that is told to end may take before it is killed."""
DONE = b"done"


def end_leftovers(variable: str, folder: str) -> None:
    """End every process of this user whose environment began with a file in folder as the variable, but for this one and
    those above it.

    What was started with another environment is not found.
    """
    spared = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    for _ in range(3):  # one may start another while it ends
        found = [
            process
            for process in psutil.process_iter()
            if process.pid not in spared and _has(process, variable, folder)
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


def _has(process: psutil.Process, variable: str, folder: str) -> bool:
    try:
        return process.environ().get(variable, "").startswith(folder + os.sep)
    except (psutil.Error, OSError):  # another user's, or gone
        return False


@contextlib.contextmanager
def watched(variable: str, folder: str) -> Iterator[None]:
    """Should this process be killed in the block, a watcher ends what the ranks left and removes the folder.

    It reads a pipe that only this process writes to, so that any death of it is seen; a session of its own keeps signals
    of the terminal from it.
    """
    watcher = subprocess.Popen(
        [sys.executable, str(Path(__file__)), variable, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            watcher.communicate(DONE)


def _watch(variable: str, folder: str) -> None:
    if sys.stdin.buffer.read() != DONE:
        end_leftovers(variable, folder)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _watch(*sys.argv[1:])
