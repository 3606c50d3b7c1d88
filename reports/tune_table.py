"""What `dsplan tune` chose, and what stood beside it. Pure: value -> string."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from dsplan.schemas.units import gib, rate, seconds
from tabulate import tabulate

if TYPE_CHECKING:
    from pathlib import Path

    from dsplan.schemas.estimate import Row
    from dsplan.schemas.tuned import Tuned

BEST_ROWS = 8


def as_text(tuned: Tuned, folder: Path) -> str:
    """For a terminal: the choice in one line, the runners-up in a table, where the files are."""
    levels = " and ".join(dict.fromkeys(row.level for row in tuned.rows)) or "formula"
    head = (
        f"engine {tuned.engine} {tuned.engine_version} ({levels}); model {tuned.model.source}: "
        f"{tuned.model.params:,} parameters; cluster: {tuned.cluster}; {len(tuned.rows)} combinations tried"
    )
    lines = [head]
    rows = tuned.rows[:BEST_ROWS]
    if tuned.plan is None:
        lines.append("nothing fits; the smallest tried:")
        rows = tuple(sorted(tuned.rows, key=lambda row: row.memory.device_bytes or 0)[:BEST_ROWS])
    else:
        lines.append(f"best: {_sentence(tuned.rows[0])}")
        lines.append(f"trains the same model: {'yes' if tuned.same_model else 'no'}, {tuned.same_model_why}")
    lines.append(
        "Speeds within 1 % count as equal; among equals the lower zero, without recompute, with fewer micro-batches."
    )
    table = tabulate([_cells(row) for row in rows], headers=_HEADERS, stralign="right", disable_numparse=True)
    lines += ["", table, ""]
    lines += [f"left out, {number} rows: {reason}" for reason, number in tuned.skipped.items()]
    if tuned.plan is not None:
        lines.append(f"wrote {folder / 'plan.json'} and {folder / 'ds_config.json'}")
    return "\n".join(lines)


def as_json(tuned: Tuned) -> str:
    """The plan as written, the rows best first, and what was left out."""
    value: dict[str, Any] = {
        "version": 1,
        "plan": tuned.plan.to_json() if tuned.plan else None,
        "same_model": tuned.same_model,
        "same_model_why": tuned.same_model_why,
        "rows": [row.to_json() for row in tuned.rows],
        "skipped": [{"reason": reason, "rows": rows} for reason, rows in tuned.skipped.items()],
    }
    return json.dumps(value, indent=2)


_HEADERS = (
    "zero",
    "prec",
    "recompute",
    "micro",
    "accum",
    "global",
    "allocated GiB",
    "device GiB",
    "step",
    "samples/s",
    "MFU",
    "verdict",
)


def _cells(row: Row) -> list[str]:
    plan, time = row.plan, row.time
    return [
        str(plan.zero_stage),
        plan.precision,
        plan.recompute,
        str(plan.micro_batch),
        str(plan.accumulation),
        str(plan.global_batch),
        gib(row.memory.allocated_bytes),
        gib(row.memory.device_bytes),
        seconds(time.step_seconds),
        "-" if time.samples_per_second is None else rate(time.samples_per_second),
        "-" if time.mfu is None else f"{time.mfu:.0%}",
        row.verdict,
    ]


def _sentence(row: Row) -> str:
    plan, time = row.plan, row.time
    speed = "" if time.samples_per_second is None else f", {rate(time.samples_per_second)} samples/s"
    return (
        f"zero {plan.zero_stage}, {plan.precision}, {plan.layout}, micro_batch {plan.micro_batch} x accumulation "
        f"{plan.accumulation}, recompute {plan.recompute}: {gib(row.memory.device_bytes)} GiB on the device{speed} ({row.verdict})"
    )
