"""What of a config watches the engine: each block or key that is on becomes an observer of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dsplan.reports import measured_table
from dsplan.runtime.groups import note
from dsplan.runtime.measuring import comms_log
from dsplan.runtime.measuring.flops_profile import FlopsProfile
from dsplan.runtime.measuring.meter import Meter
from dsplan.runtime.measuring.monitors import Monitor
from dsplan.runtime.measuring.progress_line import ProgressLine
from dsplan.runtime.measuring.wall_clock import WallClock

if TYPE_CHECKING:
    from dsplan.runtime.engine import Engine
    from dsplan.schemas.ledger import Ledger


def attach(engine: Engine, *, launched: bool) -> None:
    """The same observers on every rank: some of them communicate. Problem where a package that one needs is missing.

    launched: a record is left for the launcher, so that the engine has a meter whatever the config says.
    """
    raw = engine.config
    if _on(raw, "comms_logger"):
        comms_log.enable(raw["comms_logger"])
    tells_memory = raw.get("memory_breakdown") is True
    steps = _own(raw).get("meter_steps")
    if launched or tells_memory or steps is not None:
        engine.meter = Meter(engine, steps, _memory_teller(engine) if tells_memory else lambda _: None)
        engine.observers.append(engine.meter)
    if raw.get("wall_clock_breakdown") is True:
        engine.wall_clock = WallClock(engine)
        engine.observers.append(engine.wall_clock)
    if _on(raw, "flops_profiler"):
        engine.observers.append(FlopsProfile(engine, raw["flops_profiler"]))
    engine.monitor = Monitor(engine, raw)
    if engine.monitor.enabled:
        engine.observers.append(engine.monitor)
    every = raw.get("steps_per_print")
    if isinstance(every, int) and every > 0:
        engine.observers.append(ProgressLine(engine, every))
    if raw.get("dump_state") is True:
        note(f"config: {json.dumps(raw, indent=2, default=str)}")


def compile_options(raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What "dsplan": {"compile": ...} asks torch.compile for; None where it is off."""
    asked = _own(raw).get("compile", False)
    return asked if isinstance(asked, Mapping) else {} if asked is True else None


def _own(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    block = raw.get("dsplan")
    return block if isinstance(block, Mapping) else {}


def _on(raw: Mapping[str, Any], name: str) -> bool:
    block = raw.get(name)
    return isinstance(block, Mapping) and block.get("enabled") is True


def _memory_teller(engine: Engine) -> Any:
    def tell(ledger: Ledger) -> None:
        note(measured_table.as_text(ledger, step=engine.global_steps, rank=engine.global_rank))

    return tell
