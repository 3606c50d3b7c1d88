"""Which types a run computes, keeps, adds up and sends in, as DeepSpeed 0.19.8 takes them from its JSON."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from dsplan.schemas.config import DsConfig, Fp16
from dsplan.schemas.precision import autocast_type, block, low_masters, named_type
from torch import nn

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
AUTOCAST_SCALE = Fp16(initial_scale_power=16, loss_scale_window=2000, hysteresis=1)
"""As torch.amp.GradScaler scales, whose defaults DeepSpeed uses under torch_autocast in fp16."""


@dataclass(frozen=True)
class Precision:
    """Types of one run. autocast: forward runs under torch.autocast in it. buffers: None leaves them as they come."""

    compute: torch.dtype
    masters: torch.dtype
    reduce: torch.dtype
    autocast: torch.dtype | None
    buffers: torch.dtype | None
    kept_buffers: re.Pattern[str] | None
    """What a buffer's name must match for it to be fp32 whatever `buffers` says."""


def precision_of(config: DsConfig, model: nn.Module) -> Precision:
    """As the file says. Where it names no precision, a model all in half precision computes in its own, as in DeepSpeed."""
    raw = config.raw
    types = block(raw, "data_types")
    compute = DTYPES[config.precision]
    if config.precision == "fp32":
        own = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
        if own in ({torch.bfloat16}, {torch.float16}):
            [compute] = own
    wanted = raw.get("communication_data_type")
    reduce = named_type("bf16" if str(wanted).lower() == "bfp16" else wanted)
    if config.zero_stage < 2 and reduce is None:  # there gradients wait in the type in which they are summed
        reduce = "fp32" if named_type(types.get("grad_accum_dtype")) == "fp32" else None
    autocast, buffers = autocast_type(raw), named_type(types.get("buffer_dtype"))
    return Precision(
        compute=compute,
        masters=torch.bfloat16 if low_masters(raw) else torch.float32,
        reduce=compute if reduce is None else DTYPES[reduce],
        autocast=None if autocast is None else DTYPES[autocast],
        buffers=None if buffers is None else DTYPES[buffers],
        kept_buffers=_kept_buffers(model, types.get("keep_in_fp32_modules"), compute),
    )


def loss_scaling(config: DsConfig) -> Fp16 | None:
    """The rules by which the loss is scaled; None where it is not."""
    if config.precision == "fp16":
        return config.fp16
    return AUTOCAST_SCALE if autocast_type(config.raw) == "fp16" else None


def _kept_buffers(model: nn.Module, wanted: object, compute: torch.dtype) -> re.Pattern[str] | None:
    """By the list's patterns, else by what transformers' models say of themselves.

    Parameters that these lists name follow the compute dtype all the same. Source: deepspeed/runtime/keep_in_fp32.py.
    """
    if compute is torch.float32:
        return None
    if isinstance(wanted, list):
        patterns = {name.replace("*", ".*") for name in wanted}
    else:
        patterns = set()
        for path, module in model.named_modules():
            names = set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
            if compute is torch.float16:
                names |= set(getattr(module, "_keep_in_fp32_modules", None) or ())
            start = rf"^{re.escape(path)}\..*" if path else ""
            patterns |= {start + name.replace("*", ".*") for name in names}
    return re.compile("|".join(sorted(patterns))) if patterns else None
