"""DeepSpeed's Lion classes."""

from dsplan.runtime.optimizing.lion import Lion


class FusedLion(Lion):
    """Lion."""


class DeepSpeedCPULion(Lion):
    """Where the states live is the engine's affair."""
