"""A measured ledger as a table, phase by phase, under the words of estimate's table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsplan.schemas.ledger import CATEGORIES
from dsplan.schemas.units import in_unit, size, table_unit
from tabulate import tabulate

if TYPE_CHECKING:
    from dsplan.schemas.ledger import Ledger

HEADERS = ("peak of", "params", "grads", "optim", "activ", "gathered", "buckets", "temp", "allocated")


def as_text(ledger: Ledger, *, step: int, rank: int) -> str:
    """What one rank held at the fullest moment of each phase of a step, what stays between steps, and its collectives."""
    name, unit = table_unit(ledger.allocated_bytes)
    rows = [
        [
            moment.where,
            *(in_unit(moment.category_bytes(category), unit) for category in CATEGORIES),
            in_unit(moment.allocated_bytes, unit),
        ]
        for moment in ledger.moments
    ]
    rows.append(["between steps", *"-" * len(CATEGORIES), in_unit(ledger.resident_bytes, unit)])
    table = tabulate(rows, HEADERS, disable_numparse=True, colalign=("left", *("right",) * (len(HEADERS) - 1)))
    moved = [f"{c.kind} {c.count} times, {size(c.payload_bytes)}" for c in ledger.collectives]
    offloaded = [f"on the host (offload): {size(ledger.host_bytes)}"] if ledger.host_bytes else []
    lines = [f"memory of rank {rank} at step {step}, in {name} (measured)", table, *offloaded]
    return "\n".join([*lines, *([f"collectives: {'; '.join(moved)}"] if moved else [])])
