"""What DeepSpeed 0.19.8 allocates, and when."""

from __future__ import annotations

from dsplan.planner.memory.states import state_bytes
from dsplan.schemas.ledger import Category, Ledger, MemoryItem, Moment
from dsplan.schemas.plan import Plan
from dsplan.schemas.trace import Trace


def ledger(trace: Trace, plan: Plan) -> Ledger:
    states = state_bytes(trace, plan)
    names: tuple[Category, ...] = ("params", "grads", "optimizer")
    items = tuple(MemoryItem(category=name, bytes=states[name], why="state") for name in names)
    moment = Moment(phase="step", where="step", items=items)
    resident = states["params"] + states["optimizer"]
    return Ledger(engine=plan.engine, level="formula", moments=(moment,), resident_bytes=resident)
