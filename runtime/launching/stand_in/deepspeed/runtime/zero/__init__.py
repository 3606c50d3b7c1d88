"""deepspeed.runtime.zero is dsplan.runtime.zero."""

from dsplan.runtime.zero import GatheredParameters, Init, register_external_parameter, unregister_external_parameter

from . import partition_parameters

__all__ = [
    "GatheredParameters",
    "Init",
    "partition_parameters",
    "register_external_parameter",
    "unregister_external_parameter",
]
