"""Predicted beside measured, after a launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dsplan.schemas.ledger import CATEGORIES, Ledger
from dsplan.schemas.units import size
from tabulate import tabulate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def as_text(predicted: Mapping[str, Any] | None, ledgers: Sequence[Ledger | None]) -> str:
    """One line per category at the peak of the fullest rank, predicted (a row's memory, if any) beside measured.

    ledgers: by rank; None where a rank left no record.
    """
    held = {rank: ledger for rank, ledger in enumerate(ledgers) if ledger is not None}
    missing = [f"no record of rank {rank}" for rank in range(len(ledgers)) if rank not in held]
    if not held:
        return "\n".join(["nothing was measured: no optimizer step was made", *missing])
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
    return "\n".join([head, table, *traffic, *missing])


def _cells(before: int | None, after: int) -> tuple[str, str, str]:
    if before is None:
        return "-", size(after), "-"
    if not after:
        return size(before), size(after), "0" if before == after else size(before)
    share = round((before - after) / after, 3)
    difference = f"{share:+.1%}" if share else "0.0%"
    return size(before), size(after), difference
