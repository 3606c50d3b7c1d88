"""`--timeline`: the live bytes of one step in Chrome's trace form, which Perfetto and chrome://tracing open.

Source: the Trace Event Format (Google, "Trace Event Format", phases "C" for counters, "X" for slices, "M" for names).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dsplan.planner.memory import ledgers
from dsplan.planner.memory.curves import Instant, instants
from dsplan.schemas.ledger import CATEGORIES
from dsplan.schemas.plan import Plan
from dsplan.schemas.problem import Problem
from dsplan.schemas.trace import Trace

PROCESS, PHASES_THREAD, MODULES_THREAD = 1, 1, 2
STEP_LENGTH = 0.05
"""Share of the picture that the optimizer step takes, which is one instant of the ledger."""


def write_timeline(trace: Trace, plan: Plan, path: str) -> None:
    """The plan's timeline into a file. Problem where it cannot be written, or nothing was traced."""
    if not trace.segments:
        raise Problem(
            f"--timeline {path}: {trace.source} has no sample batch, so there is no step to draw; add "
            "sample_batch(micro_batch, seq_len=None) to the model file"
        )
    try:
        Path(path).write_text(json.dumps(timeline(trace, plan)) + "\n", "utf-8")
    except OSError as error:
        raise Problem(f"--timeline {path}: cannot be written ({error.strerror})") from error


def timeline(trace: Trace, plan: Plan) -> dict[str, Any]:
    """Of the plan's fullest pipeline stage."""
    books = ledgers(trace, plan)
    stage = max(range(len(books)), key=lambda index: books[index].allocated_bytes)
    return chrome_trace(instants(trace, plan, books[stage], stage), plan)


def chrome_trace(curve: Sequence[Instant], plan: Plan) -> dict[str, Any]:
    """Counters by category at every instant, and slices by phase and by module. One microsecond is one instant: nothing is timed."""
    step = max(1, round(STEP_LENGTH * len(curve)))
    ends = len(curve) - 1 + step
    title = f"zero {plan.zero_stage}, {plan.precision}, {plan.layout}, engine {plan.engine}"
    events: list[dict[str, Any]] = [
        _name("process_name", None, f"live bytes of the fullest rank: {title}"),
        _name("thread_name", PHASES_THREAD, "phases"),
        _name("thread_name", MODULES_THREAD, "modules"),
    ]
    for ts, instant in enumerate(curve):
        events.append(
            {
                "name": "live bytes",
                "ph": "C",
                "pid": PROCESS,
                "ts": ts,
                "args": {c: instant.bytes[c] for c in CATEGORIES},
            }
        )
    events.append({**events[-1], "ts": ends})
    phases = [instant.phase for instant in curve]
    events += [_slice(text, PHASES_THREAD, start, end) for text, start, end in _runs(phases, ends)]
    events += [
        _slice(text, MODULES_THREAD, start, end)
        for text, start, end in _nested([(instant.phase, instant.module) for instant in curve], ends)
    ]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {
            "level": "formula",
            "time": "one microsecond is one change of the live bytes; nothing is timed",
            "exact": "activations at each event, all else at the fullest moments of forward, backward and step; lines between",
            "allocated_bytes": str(max(sum(instant.bytes.values()) for instant in curve)),
        },
    }


def _runs(values: Sequence[str], ends: int) -> Iterator[tuple[str, int, int]]:
    """(value, first, end) of equal values after one another."""
    start = 0
    for index in range(1, len(values) + 1):
        if index == len(values) or values[index] != values[start]:
            yield values[start], start, index if index < len(values) else ends
            start = index


def _nested(modules: Sequence[tuple[str, str]], ends: int) -> Iterator[tuple[str, int, int]]:
    """Slices that lie in each other: "blocks.3" holds "blocks.3.attn". Parts of names that are numbers go with their list."""
    longest = max((len(_parts(module)) for _, module in modules), default=0)
    for depth in range(longest):
        keys = [
            (title, ".".join(_parts(module)[: depth + 1]), len(_parts(module)) > depth) for title, module in modules
        ]
        start = 0
        for index in range(1, len(keys) + 1):
            if index == len(keys) or keys[index] != keys[start]:
                if keys[start][2]:
                    yield keys[start][1], start, index if index < len(keys) else ends
                start = index


def _parts(module: str) -> list[str]:
    parts: list[str] = []
    for part in module.split(".") if module else []:
        if part.isdigit() and parts:
            parts[-1] += f".{part}"
        else:
            parts.append(part)
    return parts


def _slice(text: str, thread: int, start: int, end: int) -> dict[str, Any]:
    return {"name": text, "ph": "X", "pid": PROCESS, "tid": thread, "ts": start, "dur": max(1, end - start)}


def _name(kind: str, thread: int | None, text: str) -> dict[str, Any]:
    more = {} if thread is None else {"tid": thread}
    return {"name": kind, "ph": "M", "pid": PROCESS, **more, "args": {"name": text}}
