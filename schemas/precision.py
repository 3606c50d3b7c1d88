"""The types of data_types, torch_autocast and the precision blocks, and what of them the native engine cannot carry out.

Sources: deepspeed/runtime/{engine,config,precision_config,torch_autocast}.py, deepspeed/utils/torch.py of 0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

NAMES = {
    "fp32": "fp32", "float32": "fp32", "float": "fp32", "torch.float32": "fp32",
    "fp16": "fp16", "float16": "fp16", "half": "fp16", "torch.float16": "fp16",
    "bf16": "bf16", "bfloat16": "bf16", "torch.bfloat16": "bf16",
}  # fmt: skip
"""How DeepSpeed lets types be written (DtypeEnum), without int8."""


def named_type(value: object) -> str | None:
    """fp32, fp16 or bf16; None for anything else."""
    return NAMES.get(value.lower()) if isinstance(value, str) else None


def block(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """What the file says in that block; nothing where it is none."""
    value = raw.get(key)
    return value if isinstance(value, Mapping) else {}


def precision_block(raw: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """(fp32, fp16 or bf16, the block that switches it on)."""
    bf16 = block(raw, "bf16" if raw.get("bf16") is not None else "bfloat16")
    for name, found in (("fp16", block(raw, "fp16")), ("bf16", bf16)):
        if found.get("enabled") is True:
            return name, found
    return "fp32", {}


def autocast_type(raw: Mapping[str, Any]) -> str | None:
    """What forward runs under torch.autocast in; None where it does not."""
    autocast = block(raw, "torch_autocast")
    return named_type(autocast.get("dtype")) if autocast.get("enabled") is True else None


def low_masters(raw: Mapping[str, Any]) -> bool:
    """Whether the optimizer steps over bf16 weights, with its states in bf16."""
    return precision_block(raw)[1].get("bf16_master_weights_and_grads") is True


def precision_reasons(
    raw: Mapping[str, Any], zero_stage: int
) -> Iterator[tuple[str, Literal["error", "warning"], str]]:
    """(pointer, level, text) for the types that the native engine does not carry out."""
    mode, on = precision_block(raw)
    masters, states = on.get("bf16_master_weights_and_grads") is True, on.get("bf16_optimizer_states") is True
    if mode == "bf16" and masters and not states:
        yield (
            "/bf16/bf16_master_weights_and_grads",
            "error",
            "bf16 masters with fp32 optimizer states are for DeepSpeedCPUAdam alone; set bf16_optimizer_states too",
        )
    if mode == "bf16" and states and not masters:
        yield "/bf16/bf16_optimizer_states", "error", "needs bf16_master_weights_and_grads; set it too, or remove this"
    if mode == "bf16" and masters and zero_stage == 0:
        yield "/bf16/bf16_master_weights_and_grads", "error", "needs ZeRO stage 1, 2 or 3, as in DeepSpeed"
    autocast = block(raw, "torch_autocast")
    if autocast.get("enabled") is True and autocast_type(raw) not in ("fp16", "bf16"):
        given = repr(autocast["dtype"]) if autocast.get("dtype") is not None else "absent"
        yield "/torch_autocast/dtype", "error", f"is {given}, but must be bf16 or fp16"
    types = block(raw, "data_types")
    for key in ("param_dtype", "buffer_dtype", "grad_accum_dtype"):
        value = types.get(key)
        if value is not None and named_type(value) is None:
            yield f"/data_types/{key}", "error", f"is {value!r}, but must be fp32, fp16 or bf16"
    wanted = named_type(types.get("param_dtype"))
    if wanted not in (None, mode):
        yield (
            "/data_types/param_dtype",
            "error",
            f"is {wanted}, but the precision is {mode}; switch {wanted} on in its own block, or remove this",
        )
    keep = types.get("keep_in_fp32_modules", "auto")
    if keep not in (None, "auto") and not (isinstance(keep, list) and all(isinstance(name, str) for name in keep)):
        yield "/data_types/keep_in_fp32_modules", "error", 'must be "auto" or a list of patterns of buffer names'
    adds_up = named_type(types.get("grad_accum_dtype"))
    if adds_up not in (None, "fp32") and (zero_stage >= 2 or adds_up != mode):
        yield "/data_types/grad_accum_dtype", "warning", "no effect: gradients add up in fp32"
