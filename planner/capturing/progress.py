"""Which line of a script its time goes to: sampled from beside it, for the one who waits to read."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

EVERY_SECONDS = 0.05
WRITES_EVERY = 4


def watch(script: str, file: Path, parent_pid: int) -> None:
    """Samples the main thread from now on. Ends the whole process group where the parent is gone."""
    main = threading.main_thread().ident
    lines: Counter[int] = Counter()
    own = os.path.abspath(script)
    start = time.monotonic()

    def sample() -> None:
        assert main is not None
        for count in range(1, sys.maxsize):
            time.sleep(EVERY_SECONDS)
            if os.getppid() != parent_pid:
                os.killpg(0, signal.SIGKILL)
            line = line_of(sys._current_frames().get(main), own)
            lines[line] += 1
            if count % WRITES_EVERY == 1:
                told = {"lines": dict(lines), "seconds": time.monotonic() - start}
                aside = file.with_suffix(".new")
                aside.write_text(json.dumps(told))
                aside.replace(file)

    threading.Thread(target=sample, daemon=True).start()


def line_of(frame: Any, script: str) -> int:
    """The innermost line of the script; 0 while it has none."""
    while frame is not None:
        name = frame.f_code.co_filename
        if name == script or (not name.startswith("<") and os.path.abspath(name) == script):
            return int(frame.f_lineno)
        frame = frame.f_back
    return 0


def slowest_line(file: Path, script: Path) -> str:
    """ "4.1 s of it in line 31 (for batch in loader:)"; empty where nothing is known."""
    try:
        told = json.loads(file.read_text())
    except (OSError, ValueError):
        return "the imports of dsplan itself took all of it"
    lines = {int(line): samples for line, samples in told["lines"].items()}
    total = sum(lines.values())
    if not total:
        return ""
    line, samples = max(lines.items(), key=lambda item: item[1])
    seconds = told["seconds"] * samples / total
    if line == 0:
        return f"{seconds:.1f} s of it before its first line"
    try:
        text = script.read_text(errors="replace").splitlines()[line - 1].strip()
    except (OSError, IndexError):
        text = ""
    shown = text if len(text) <= 60 else f"{text[:57]}..."
    return f"{seconds:.1f} s of it in line {line}" + (f" ({shown})" if shown else "")
