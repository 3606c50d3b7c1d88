"""A training script -> its trace: run unchanged in a child process, on a stand-in for deepspeed, up to the first backward."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from dsplan.planner.capturing.confining import OFFLINE
from dsplan.planner.capturing.progress import slowest_line
from dsplan.planner.models.load import TRACE_TIMEOUT_SECONDS, Subject
from dsplan.schemas.choices import Built, OptimizerSpec
from dsplan.schemas.problem import Problem
from dsplan.schemas.trace import Trace

START = """
import sys
if sys.path[:1] == [""]:
    del sys.path[0]
from dsplan.planner.%s import main
main()
"""
"""The child, without the working folder on its import path: a json.py there is none of ours, nor of `python SCRIPT`."""


BACKWARD = "engine.backward()"
"""How far a script is run for its trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """What one run of the script told: its trace, and what it hands to `initialize` and feeds."""

    trace: Trace
    config: dict[str, Any] | None
    optimizer: OptimizerSpec | None
    micro_batch: int | None
    built: Built


class ScriptSubject(Subject):
    """A training script. Its config, optimizer and micro_batch are known after a first run, which asking for them starts."""

    def __init__(self, path: Path, script_args: Sequence[str] = (), timeout_seconds: float = TRACE_TIMEOUT_SECONDS):
        self._first: Capture | None = None
        super().__init__(source=str(path), kind="script")
        self.path = path
        self.script_args = tuple(script_args)
        self.timeout_seconds = timeout_seconds

    @property
    def first(self) -> Capture:
        """The script as it is: its own precision and batch."""
        if self._first is None:
            self._first = run_script(self, {"precision": None, "recompute": None, "micro_batch": None})
        return self._first

    def _from_first(name: str) -> Any:  # type: ignore[misc]
        def read(self: ScriptSubject) -> Any:
            return getattr(self.first, name)

        def ignore(self: ScriptSubject, value: Any) -> None:
            """The fields of the base class have no say here."""

        return property(read, ignore)

    config = _from_first("config")
    optimizer = _from_first("optimizer")
    micro_batch = _from_first("micro_batch")
    built = _from_first("built")
    del _from_first


def capture(subject: ScriptSubject, precision: str | None, recompute: str | None, micro_batch: int | None) -> Trace:
    """The trace of a script at this precision, recompute policy and micro_batch; None: the script's own."""
    own = subject.first
    asked = (precision or own.trace.precision, recompute or own.trace.recompute, micro_batch or own.micro_batch)
    if asked == (own.trace.precision, own.trace.recompute, own.micro_batch):
        return own.trace
    request = {
        "precision": asked[0],
        "recompute": asked[1],
        "micro_batch": None if asked[2] == own.micro_batch else asked[2],
    }
    return run_script(subject, request).trace


def run_script(subject: ScriptSubject, request: dict[str, Any]) -> Capture:
    """One run of the script, up to its first backward."""
    answer = answer_of(subject, request)
    optimizer = answer["optimizer"]
    return Capture(
        trace=Trace.from_json(answer["trace"]),
        config=answer["config"],
        optimizer=OptimizerSpec(**optimizer) if optimizer else None,
        micro_batch=answer["micro_batch"],
        built="meta" if answer["zero_init"] else "host",
    )


def answer_of(
    subject: ScriptSubject, request: dict[str, Any], by: str = "capturing.capture_child", until: str = BACKWARD
) -> dict[str, Any]:
    """What a run of the script in a child answers; Problem where it does not. by: the module whose main() runs it, until what.

    What the script prints is kept out of our stdout; what it writes goes to a temporary folder.
    """
    with tempfile.TemporaryDirectory(prefix="dsplan-", ignore_cleanup_errors=True) as folder:
        answer_file, progress_file = Path(folder, "answer.json"), Path(folder, "progress.json")
        temporary = Path(folder, "tmp")
        temporary.mkdir()
        full = {
            **request,
            "script": str(subject.path),
            "answer": str(answer_file),
            "progress": str(progress_file),
            "folder": folder,
            "parent_pid": os.getpid(),
        }
        command = [sys.executable, "-c", START % by, json.dumps(full), *subject.script_args]
        with _ended_by_sigterm():
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **OFFLINE, "TMPDIR": str(temporary), "MPLCONFIGDIR": str(temporary)},
            )
            printed = _Tail(child.stdout)
            try:
                code = child.wait(subject.timeout_seconds)
            except subprocess.TimeoutExpired:
                raise Problem(_too_slow(subject, until, slowest_line(progress_file, subject.path))) from None
            finally:
                _end(child)
                tail = printed.text()
        if not answer_file.exists():
            raise _died(subject.source, code, tail, until)
        answer: dict[str, Any] = json.loads(answer_file.read_text())
    if "problem" in answer:
        raise Problem(answer["problem"], user_traceback=answer.get("user_traceback"))
    return answer


def _too_slow(subject: ScriptSubject, until: str, slowest: str) -> str:
    return (
        f"{subject.source}: no {until} within {subject.timeout_seconds:g} s{f'; {slowest}' if slowest else ''}; give it "
        "less to do before its first step (its arguments go after --), or more time by --trace-timeout"
    )


class _Tail:
    """The last that a child prints, however much it is."""

    MOST_BYTES = 1 << 16

    def __init__(self, stream: IO[bytes] | None):
        assert stream is not None
        self._stream = stream
        self._held = b""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with contextlib.suppress(ValueError, OSError):
            while chunk := os.read(self._stream.fileno(), self.MOST_BYTES):
                self._held = (self._held + chunk)[-self.MOST_BYTES :]

    def text(self) -> str:
        """Once the child is gone."""
        self._thread.join(1.0)
        self._stream.close()
        return self._held.decode(errors="replace")


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM leaves by an exception meanwhile, so that the child is ended first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(child: subprocess.Popen[bytes]) -> None:
    """The child and what it started (data workers) are gone afterwards."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _named(until: str) -> str:
    return f"its first {until}" if until == BACKWARD else f"its {until}"


def _died(source: str, code: int, printed: str, until: str) -> Problem:
    tail = "\n".join(printed.strip().splitlines()[-20:])
    if code < 0:
        name = signal.Signals(-code).name if -code in list(signal.Signals) else ""
        hint = "; often the host is out of memory" if code == -signal.SIGKILL else ""
        return Problem(
            f"{source}: killed by signal {-code} ({name}) before {_named(until)}{hint}",
            user_traceback=tail or None,
        )
    return Problem(f"{source}: ended with exit code {code} before {_named(until)}", user_traceback=tail or None)
