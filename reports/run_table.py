"""Predicted beside measured, after a launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dsplan.schemas.ledger import CATEGORIES, Ledger
from dsplan.schemas.units import seconds, size
from tabulate import tabulate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def as_text(
    predicted: Mapping[str, Any] | None,
    ledgers: Sequence[Ledger | None],
    *,
    steps: Sequence[float | None] = (),
    devices: Sequence[str | None] = (),
    predicted_step: float | None = None,
) -> str:
    """One line per category at the peak of the fullest rank, predicted (a row's memory, if any) beside measured.

    By rank: ledgers, None where a rank left no record; steps, the seconds that one took; devices, by name.
    predicted_step: seconds, on the cluster that the plan was made for.
    """
    held = {rank: ledger for rank, ledger in enumerate(ledgers) if ledger is not None}
    there = {rank for rank, device in enumerate(devices) if device is not None} | set(held)
    missing = [f"no record of rank {rank}" for rank in range(len(ledgers)) if rank not in there]
    if not held:
        return "\n".join(["nothing was measured: no step was watched to its end", *missing])
    worst = max(held, key=lambda rank: held[rank].allocated_bytes)
    ledger = held[worst]
    told = predicted or {}
    lines: list[tuple[str, int | None, int]] = [
        (category, told.get(f"{category}_bytes"), ledger.peak.category_bytes(category)) for category in CATEGORIES
    ]
    lines.append(("allocated", told.get("allocated_bytes"), ledger.allocated_bytes))
    rows = [(name, *_cells(before, after)) for name, before, after in lines]
    if predicted is None:
        table = tabulate(
            [(name, after) for name, _, after, _ in rows], ["memory", "measured"], colalign=("left", "right")
        )
    else:
        header = ["memory", "predicted", "measured", "difference"]
        table = tabulate(rows, header, colalign=("left", "right", "right", "right"))
    head = f"peak of rank {worst}, the fullest of {len(ledgers)}, in {ledger.peak.phase} (engine {ledger.engine})"
    traffic = [
        f"{collective.kind}: {collective.count} per step, {size(collective.payload_bytes)}"
        for collective in ledger.collectives
    ]
    offloaded = [f"on the host (offload): {size(ledger.host_bytes)} of rank {worst}"] if ledger.host_bytes else []
    timed = [step_line(steps, devices, predicted_step)] if devices else []
    return "\n".join([head, table, *offloaded, *traffic, *timed, *missing])


def step_line(steps: Sequence[float | None], devices: Sequence[str | None], predicted_step: float | None) -> str:
    """ "step: 312 ms on 2 x cpu": the median of the slowest rank."""
    known = [step for step in steps if step is not None]
    took = seconds(max(known)) if known else "not timed, too few steps,"
    names = [device for device in devices if device is not None]
    where = " and ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    told = f"; predicted {seconds(predicted_step)} on the plan's cluster" if predicted_step is not None else ""
    return f"step: {took} on {where}{told}"


def _cells(before: int | None, after: int) -> tuple[str, str, str]:
    if before is None:
        return "-", size(after), "-"
    if not after:
        return size(before), size(after), "0" if before == after else size(before)
    share = round((before - after) / after, 3)
    difference = f"{share:+.1%}" if share else "0.0%"
    return size(before), size(after), difference
