"""deepspeed.checkpointing is dsplan.runtime.checkpointing."""

from dsplan.runtime.checkpointing import checkpoint, configure, is_configured, reset

__all__ = ["checkpoint", "configure", "is_configured", "reset"]
