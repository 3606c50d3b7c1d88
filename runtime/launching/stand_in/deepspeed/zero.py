"""deepspeed.zero is dsplan.runtime.zero."""

from dsplan.runtime.zero import GatheredParameters, Init, register_external_parameter, unregister_external_parameter

__all__ = ["GatheredParameters", "Init", "register_external_parameter", "unregister_external_parameter"]
