"""Stand-in for DeepSpeed under `dsplan launch`: its calls, carried out by dsplan's native engine."""

from __future__ import annotations

from typing import Any

from dsplan.runtime import Engine, add_config_arguments, init_distributed, initialize

from . import accelerator, checkpoint, checkpointing, comm, ops, runtime, utils, zero
from .accelerator import get_accelerator
from .runtime import lr_schedules
from .utils import log_dist, logger

__version__ = "0.19.8"
__version_major__, __version_minor__, __version_patch__ = 0, 19, 8
DeepSpeedEngine = Engine
dist = comm

__all__ = [
    "DeepSpeedEngine",
    "accelerator",
    "add_config_arguments",
    "checkpoint",
    "checkpointing",
    "comm",
    "init_distributed",
    "get_accelerator",
    "initialize",
    "log_dist",
    "logger",
    "lr_schedules",
    "ops",
    "runtime",
    "utils",
    "zero",
]


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"deepspeed.{name} is not carried out by dsplan's native engine; run this script with DeepSpeed"
    )
