"""deepspeed.runtime.engine is dsplan.runtime.engine."""

from dsplan.runtime.engine import Engine as DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
