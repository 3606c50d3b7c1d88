"""The bundled engine: DeepSpeed's `initialize` on PyTorch's own distributed parts. Imports torch on first use only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsplan.runtime import checkpointing, zero
    from dsplan.runtime.engine import Engine
    from dsplan.runtime.groups import init_distributed
    from dsplan.runtime.initializing import add_config_arguments, initialize
    from dsplan.runtime.measuring.comms_log import log_summary

__all__ = ["Engine", "add_config_arguments", "checkpointing", "init_distributed", "initialize", "log_summary", "zero"]

_HOMES = {
    "Engine": "dsplan.runtime.engine",
    "add_config_arguments": "dsplan.runtime.initializing",
    "init_distributed": "dsplan.runtime.groups",
    "initialize": "dsplan.runtime.initializing",
    "log_summary": "dsplan.runtime.measuring.comms_log",
}


_MODULES = ("checkpointing", "zero")


def __getattr__(name: str) -> Any:
    import importlib

    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
