"""What transformers reaches for around zero.Init: DeepSpeed's wrapper of tensor constructors, which nothing here uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from dsplan.runtime.zero import GatheredParameters, Init, register_external_parameter, unregister_external_parameter

from deepspeed.accelerator import get_accelerator

_orig_torch_arange = torch.arange


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
    return fn


__all__ = [
    "GatheredParameters",
    "Init",
    "get_accelerator",
    "register_external_parameter",
    "unregister_external_parameter",
    "zero_wrapper_for_fp_tensor_constructor",
]
