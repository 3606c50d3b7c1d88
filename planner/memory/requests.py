"""What an engine asks of the allocator in two steps, request by request: for how it fragments, not for how much it is.

The bytes are the ledger's; these requests have the sizes and lifetimes that decide how well they fit into each other. Where
nothing is traced there are none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsplan.planner.memory import native_requests
from dsplan.planner.memory.allocator import Reserved, replay
from dsplan.planner.memory.asking_rank import STEPS, AskingRank
from dsplan.planner.memory.deepspeed import requests as deepspeed_requests
from dsplan.schemas.plan import Plan
from dsplan.schemas.trace import Trace


@dataclass(frozen=True, slots=True)
class Requests:
    """Time-ordered (storage, bytes) of two steps, and the streams of storages that are not made on the first one."""

    events: list[tuple[int, int]]
    streams: dict[int, int]

    def replay(self, *, expandable: bool = False, limit_bytes: int | None = None) -> Reserved:
        return replay(self.events, streams=self.streams, expandable=expandable, limit_bytes=limit_bytes)


def recorded(events: Sequence[tuple[int, int]], resident: int) -> Requests:
    """Those of a rehearsed step, twice. The first `resident` events are of what is there before it and after it."""
    held: dict[int, int] = {}
    for storage, delta in events[:resident]:
        held[storage] = held.get(storage, 0) + delta
    whole = list(events[:resident])
    for _ in range(STEPS):
        sizes = dict(held)
        for storage, delta in events[resident:]:
            sizes[storage] = sizes.get(storage, 0) + delta
        whole += events[resident:]
        whole += [(storage, held.get(storage, 0) - size) for storage, size in sizes.items()]
    return Requests([event for event in whole if event[1]], {})


def requests_of(trace: Trace, plan: Plan) -> Requests | None:
    """What a rank of the first pipeline stage asks for; None where nothing is traced."""
    if not trace.segments or not len(trace.events):
        return None
    rank = AskingRank(trace, plan)
    (native_requests if plan.engine == "native" else deepspeed_requests).ask(rank)
    return Requests(rank.events, rank.streams)
