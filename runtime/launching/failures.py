"""Why a launch failed: what the ranks left in the folder, and how they ended."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsplan.runtime.launching.agent import Outcome


@dataclass(frozen=True, kw_only=True)
class Failure:
    """exit_code: for the shell. line: the rank at fault and why. detail: what goes before it, a traceback mostly."""

    exit_code: int
    line: str
    detail: str = ""
    refused: bool = False
    stopped: bool = False

    @property
    def may_pass(self) -> bool:
        """Whether it makes sense to start again: neither refused nor stopped by the user."""
        return not self.refused and not self.stopped


def read_failure(folder: Path, outcome: Outcome) -> Failure:
    """Of the first rank that failed."""
    if outcome.stopped_by is not None:
        name = outcome.stopped_by.name
        return Failure(exit_code=128 + outcome.stopped_by, line=f"stopped by {name}", stopped=True)
    told: dict[int, dict[str, Any]] = {}
    for rank in outcome.exit_codes:
        path = folder / f"failure_{rank}.json"
        if path.exists():
            told[rank] = json.loads(path.read_text("utf-8"))
    # A rank that was killed leaves no word, and its death is what the others then complain of.
    killed = [rank for rank, exit_code in outcome.exit_codes.items() if exit_code < 0 and rank not in told]
    first = min(killed) if killed else min(told, key=lambda rank: told[rank]["time"], default=min(outcome.exit_codes))
    exit_code = outcome.exit_codes[first]
    record = told.get(first, {"text": "", "refused": False, "cause": "", "explanation": ""})
    if record["refused"]:
        cause = f"rank {first} failed:\n{record['cause'].rstrip()}" if record["cause"] else ""
        return Failure(exit_code=exit_code, line=record["text"], detail=cause, refused=True)
    why = f": {record['explanation']}" if record["explanation"] else ""
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        hint = " (out of memory on the host, perhaps)" if exit_code == -signal.SIGKILL else ""
        return Failure(exit_code=128 - exit_code, line=f"rank {first} was killed by {name}{hint}{why}")
    others = " and ".join(f"rank {rank}" for rank in outcome.left)
    after = f", after {others} had left with code 0; all ranks must make the same steps" if others else ""
    return Failure(
        exit_code=exit_code,
        line=f"rank {first} ended with exit code {exit_code}{after}{why}",
        detail=f"rank {first} failed:\n{record['text'].rstrip()}" if record["text"] else "",
    )
