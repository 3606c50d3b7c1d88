"""What transformers reaches for around zero.Init: DeepSpeed's wrapper of tensor constructors, which nothing here uses."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from dsplan.runtime.zero import GatheredParameters, Init, register_external_parameter, unregister_external_parameter

from deepspeed.accelerator import get_accelerator

_orig_torch_arange = torch.arange


class ZeroParamStatus(Enum):
    """Of DeepSpeed's parameters, which bear a ds_id. None here does."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
    return fn


__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "get_accelerator",
    "register_external_parameter",
    "unregister_external_parameter",
    "zero_wrapper_for_fp_tensor_constructor",
]
