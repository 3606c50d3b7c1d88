"""deepspeed.zero is dsplan.runtime.zero."""

from dsplan.runtime.zero import GatheredParameters, Init

__all__ = ["GatheredParameters", "Init"]
