"""The trace as an engine runs it whose linear layers keep their inputs, also where their weights are frozen."""

from __future__ import annotations

from dataclasses import replace

from dsplan.schemas.plan import Plan
from dsplan.schemas.trace import READ, Events, Trace


def as_run(trace: Trace, plan: Plan) -> Trace:
    """Stage 3 of DeepSpeed replaces torch's linear by one that saves input and weight, whichever is trained.

    Source: deepspeed/runtime/zero/linear.py, LinearFunctionForZeroStage3 (memory_efficient_linear).
    """
    if plan.engine != "deepspeed" or plan.zero_stage != 3 or not plan.knobs.memory_efficient_linear:
        return trace
    events = trace.events
    found = _remembered.get(id(events))
    if found is None or found[0] is not events:
        if len(_remembered) > 256:
            _remembered.clear()
        found = _remembered[id(events)] = (events, kept_inputs(events) if READ in events.label else events)
    if found[1] is events:
        return trace
    known = _traces.get(id(trace))
    if known is None or known[0] is not trace:
        if len(_traces) > 256:
            _traces.clear()
        known = _traces[id(trace)] = (trace, replace(trace, events=found[1]))
    return known[1]


_remembered: dict[int, tuple[Events, Events]] = {}
_traces: dict[int, tuple[Trace, Trace]] = {}


def kept_inputs(events: Events) -> Events:
    """The same, at the same places, where what a linear with a frozen weight reads is freed no sooner than its mark."""
    storage, delta = list(events.storage), list(events.delta_bytes)
    kept_by: dict[int, int] = {}
    readers: dict[int, set[int]] = {}
    waiting: dict[int, int] = {}
    opened = -1
    for place, (held, change) in enumerate(zip(events.storage, events.delta_bytes, strict=True)):
        if opened >= 0:  # what it keeps follows each new mark
            kept_by[opened] = held
            readers.setdefault(held, set()).add(opened)
            opened = -1
        elif events.label[held] == READ and held not in kept_by:
            opened = held
        elif events.label[held] == READ:
            kept = kept_by[held]
            readers[kept].discard(held)
            if kept in waiting and not readers[kept]:
                freed = waiting.pop(kept)
                storage[place], delta[place] = kept, delta[freed]
                storage[freed], delta[freed] = held, 0
        elif change < 0 and readers.get(held):
            waiting[held] = place
    return Events.of(storage, delta, events.module, events.label, events.modules)
