"""Collectives as a table: by kind and size, how often, how long, how fast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dsplan.schemas.units import GB, rate, seconds, size
from tabulate import tabulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """All calls of one kind on one size. payload_bytes: the full tensor of one call."""

    kind: str
    payload_bytes: int
    count: int
    seconds: float
    ranks: int

    @property
    def mean_seconds(self) -> float:
        return self.seconds / self.count

    @property
    def payload_bytes_per_second(self) -> float:
        return self.payload_bytes / self.mean_seconds if self.seconds else 0.0

    @property
    def bus_bytes_per_second(self) -> float:
        """What a link carries if the collective is a ring. Source: NVIDIA nccl-tests, PERFORMANCE.md."""
        share = (self.ranks - 1) / self.ranks
        factor = {"all_reduce": 2 * share, "all_gather": share, "reduce_scatter": share, "all_to_all": share}
        return self.payload_bytes_per_second * factor.get(self.kind, 1.0)


def as_text(timings: Sequence[Timing], waited: Mapping[tuple[str, int], float] | None = None) -> str:
    """waited: seconds by (kind, payload_bytes) that this rank was slower than the fastest; a column where there are any."""
    if not timings:
        return "no collective was logged"
    rows = []
    for timing in sorted(timings, key=lambda timing: -timing.seconds):
        bus = f"{rate(timing.bus_bytes_per_second / GB)} GB/s"
        row = [timing.kind, size(timing.payload_bytes), str(timing.count)]
        row += [seconds(timing.seconds), seconds(timing.mean_seconds), bus]
        if waited:
            row.append(seconds(waited.get((timing.kind, timing.payload_bytes), 0.0)))
        rows.append(row)
    headers = [
        "collective",
        "payload",
        "count",
        "in all",
        "each",
        "bus rate",
        *(["waited for others"] if waited else []),
    ]
    return tabulate(rows, headers, disable_numparse=True, colalign=("left", *("right",) * (len(headers) - 1)))
