"""Runs dsplan's commands in processes that have torch already: a fork of one that did nothing but import, for each.

`python tests/helpers/forked_commands.py` is that process: of each line on stdin, a JSON list of [arguments, folder, file of stdout, file
of stderr], it answers the exit code on a line.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from pathlib import Path


class Commands:
    """Use as a context manager."""

    def __enter__(self) -> Commands:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def run(self, arguments: list[str], folder: Path, scratch: Path) -> subprocess.CompletedProcess[str]:
        """scratch: where the two files may lie."""
        assert self._process.stdin is not None and self._process.stdout is not None
        out, err = scratch / "stdout", scratch / "stderr"
        self._process.stdin.write(json.dumps([arguments, str(folder), str(out), str(err)]) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        return subprocess.CompletedProcess(arguments, code, out.read_text("utf-8"), err.read_text("utf-8"))


def _run(arguments: list[str], folder: str, out: str, err: str) -> int:
    """In the fork."""
    from dsplan.planner.cli import main

    for number, file in ((0, os.devnull), (1, out), (2, err)):
        os.dup2(os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), number)
    os.chdir(folder)
    sys.argv = ["dsplan", *arguments]
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    return 0


def _serve() -> None:
    import dsplan.planner.cli
    import dsplan.planner.tracing.tracer  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = _run(*json.loads(line))
                atexit._run_exitfuncs()
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    _serve()
