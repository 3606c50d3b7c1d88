"""DsConfig: what a DeepSpeed JSON means, with DeepSpeed 0.19.8's defaults filled in.

Sources: deepspeed/runtime/{config,constants,precision_config}.py, deepspeed/runtime/zero/{config,offload_config}.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from dsplan.schemas.choices import RECOMPUTES, Offload, OptimizerSpec, Recompute, ZeroKnobs, optimizer_named
from dsplan.schemas.config_knobs import read_knobs
from dsplan.schemas.optimizer import DECAY_IN_GRADIENT
from dsplan.schemas.problem import Problem

AUTO = "auto"
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
GRADIENT_CLIPPING_DEFAULT = 1.0
"""Source: deepspeed/runtime/constants.py of 0.19.8, GRADIENT_CLIPPING_DEFAULT (0 before June 2026)."""


class ConfigError(Problem):
    """Every reason why a configuration cannot be meant, at once. `reasons` keeps them apart, as (pointer, text)."""

    def __init__(self, reasons: list[tuple[str, str]], source: str = "config"):
        self.reasons = tuple(reasons)
        self.source = source
        super().__init__(
            "; ".join(f"{source}: {pointer.lstrip('/').replace('/', '.')} {text}" for pointer, text in reasons)
        )


TAG_VALIDATIONS: dict[str, Literal["ignore", "warn", "fail"]] = {"ignore": "ignore", "warn": "warn", "fail": "fail"}
"""Source: deepspeed/runtime/constants.py, ValidationMode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp16:
    """The fp16 block. loss_scale 0: dynamic."""

    loss_scale: float = 0.0
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: float = 1.0
    auto_cast: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A type with its params, as in the optimizer and scheduler blocks."""

    type: str
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """How the native engine writes them. keep_last: None keeps all. background: training goes on meanwhile."""

    keep_last: int | None = None
    background: bool = False
    tag_validation: Literal["ignore", "warn", "fail"] = "warn"


@dataclass(frozen=True, slots=True, kw_only=True)
class DsConfig:
    """One configuration as DeepSpeed reads it. Batch fields are None where absent and AUTO where a reader is to fill them."""

    raw: Mapping[str, Any]
    source: str
    train_batch_size: int | str | None
    micro_batch: int | str | None
    accumulation: int | str | None
    zero_stage: int
    precision: str
    fp16: Fp16
    gradient_clipping: float
    optimizer: Named | None
    scheduler: Named | None
    offload: Offload
    knobs: ZeroKnobs
    recompute: Recompute
    checkpoints: Checkpoints
    dataloader_workers: int
    unfilled: tuple[str, ...]
    """Pointers whose value is "auto"."""


def read_config(raw: Any, source: str = "config") -> DsConfig:
    """DsConfig of a parsed JSON object. ConfigError with every reason where a value that we use has the wrong shape.

    "auto" counts as absent in the blocks where DeepSpeed drops it, and stays AUTO in the batch fields.
    What no field names (a misspelt key, say) is lint's affair, not ours.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError([("", f"is {_shape(raw)}, but must be an object")], source)
    take = _Reader(raw, source)
    zero = take.block("zero_optimization")
    if isinstance(raw.get("zero_optimization"), bool):  # deprecated form: true is stage 1
        zero = {"stage": int(raw["zero_optimization"])}
    stage = take.integer(zero, "zero_optimization", "stage", 0, low=0, high=3)
    fp16_block = take.block("fp16")
    bf16_key = "bfloat16" if raw.get("bf16") is None and "bfloat16" in raw else "bf16"
    fp16_on = take.boolean(fp16_block, "fp16", "enabled", False)
    bf16_on = take.boolean(take.block(bf16_key), bf16_key, "enabled", False)
    if fp16_on and bf16_on:
        take.wrong(
            f"/{bf16_key}/enabled",
            "is true beside fp16.enabled, but only one precision can be on; remove one of the two",
        )
    number = take.number
    fp16 = Fp16(
        loss_scale=number(fp16_block, "fp16", "loss_scale", 0.0, low=0),
        initial_scale_power=take.integer(fp16_block, "fp16", "initial_scale_power", 16, high=127),  # fp32 ends there
        loss_scale_window=take.integer(fp16_block, "fp16", "loss_scale_window", 1000, low=1),
        hysteresis=take.integer(fp16_block, "fp16", "hysteresis", 2),
        consecutive_hysteresis=take.boolean(fp16_block, "fp16", "consecutive_hysteresis", False),
        min_loss_scale=number(fp16_block, "fp16", "min_loss_scale", 1.0, low=0),
        auto_cast=take.boolean(fp16_block, "fp16", "auto_cast", False),
    )
    knobs = read_knobs(take, zero, fp16_block if fp16_on else take.block(bf16_key) if bf16_on else {})
    own = take.block("dsplan")
    recompute = own.get("recompute", "none")
    if recompute not in RECOMPUTES:
        take.wrong("/dsplan/recompute", f"is {recompute!r}, but must be one of {', '.join(RECOMPUTES)}")
    clip = raw.get("gradient_clipping", GRADIENT_CLIPPING_DEFAULT)
    if clip != AUTO and (isinstance(clip, bool) or not isinstance(clip, (int, float)) or clip != clip):
        take.wrong("/gradient_clipping", f"is {_shape(clip)}, but must be a number (0 switches it off)")
    config = DsConfig(
        raw=MappingProxyType(dict(raw)),
        source=source,
        train_batch_size=take.batch("train_batch_size"),
        micro_batch=take.batch("train_micro_batch_size_per_gpu"),
        accumulation=take.batch("gradient_accumulation_steps"),
        zero_stage=stage,
        precision="fp16" if fp16_on else "bf16" if bf16_on else "fp32",
        fp16=fp16,
        gradient_clipping=GRADIENT_CLIPPING_DEFAULT if clip == AUTO else clip,
        optimizer=take.named("optimizer"),
        scheduler=take.named("scheduler"),
        offload=_offload(take, zero, stage),
        knobs=knobs,
        recompute=recompute,
        checkpoints=_checkpoints(take, own),
        dataloader_workers=take.integer(own, "dsplan", "dataloader_workers", 0, low=0),
        unfilled=tuple(_autos(raw)),
    )
    if take.reasons:
        raise ConfigError(take.reasons, source)
    return config


def optimizer_spec(config: DsConfig) -> OptimizerSpec | None:
    """The optimizer that the JSON names, as far as memory knows it; None where it names none or an unknown one."""
    if config.optimizer is None:
        return None
    spec = optimizer_named(config.optimizer.type)
    if spec is None:
        return None

    def positive(key: str) -> bool:
        value = config.optimizer.params.get(key, 0) if config.optimizer else 0
        return isinstance(value, (int, float)) and value > 0

    return replace(
        spec,
        momentum=spec.momentum or positive("momentum"),
        weight_decay=spec.name in DECAY_IN_GRADIENT and positive("weight_decay"),
        amsgrad=config.optimizer.params.get("amsgrad") is True,
    )


def _offload(take: _Reader, zero: Mapping[str, Any], stage: int) -> Offload:
    def device(key: str) -> str:
        block = zero.get(key)
        if (
            block is None
            and zero.get(key.replace("offload_optimizer", "cpu_offload").replace("offload_param", "cpu_offload_param"))
            is True
        ):
            return "cpu"
        if block is None or block == AUTO:
            return "none"
        if not isinstance(block, Mapping):
            take.wrong(
                f"/zero_optimization/{key}",
                f'is {_shape(block)}, but must be an object like {{"device": "cpu"}}',
            )
            return "none"
        value = block.get("device", "none")
        value = "none" if value in (None, AUTO) else value
        if value not in ("none", "cpu", "nvme"):
            take.wrong(f"/zero_optimization/{key}/device", f"is {value!r}, but must be cpu, nvme or none")
        return str(value)

    if device("offload_param") != "none" and stage == 3:
        return "param"
    return "optimizer" if device("offload_optimizer") != "none" and stage > 0 else "none"


def _checkpoints(take: _Reader, own: Mapping[str, Any]) -> Checkpoints:
    """dsplan.checkpoint, and of DeepSpeed's block what the native engine carries out too."""
    block = own.get("checkpoint") or {}
    if not isinstance(block, Mapping):
        take.wrong("/dsplan/checkpoint", f'is {_shape(block)}, but must be an object like {{"keep_last": 3}}')
        block = {}
    theirs = take.block("checkpoint")
    writer = theirs.get("writer")
    decoupled = take.boolean(writer, "checkpoint/writer", "decoupled", False) if isinstance(writer, Mapping) else False
    validation = theirs.get("tag_validation", "Warn")
    if not isinstance(validation, str) or validation.lower() not in TAG_VALIDATIONS:
        take.wrong("/checkpoint/tag_validation", f"is {validation!r}, but must be one of Ignore, Warn, Fail")
        validation = "Warn"
    return Checkpoints(
        keep_last=take.integer(block, "dsplan/checkpoint", "keep_last", 1, low=1) if "keep_last" in block else None,
        background=take.boolean(block, "dsplan/checkpoint", "async", decoupled),
        tag_validation=TAG_VALIDATIONS[validation.lower()],
    )


def _shape(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, str):
        return f'"{value}"'
    return "a list" if isinstance(value, list) else "an object"


def _autos(value: Any, pointer: str = "") -> list[str]:
    if value == AUTO and isinstance(value, str):
        return [pointer]
    if isinstance(value, Mapping):
        return [found for key, member in value.items() for found in _autos(member, f"{pointer}/{key}")]
    return []


def named_block(raw: Mapping[str, Any], key: str) -> Named | None:
    """The optimizer or scheduler block, also of a config in which other things are wrong; None where it is itself."""
    return _Reader(raw, "").named(key)


class _Reader:
    """Takes values out of the object and collects what is wrong with them, so that all is said at once."""

    def __init__(self, raw: Mapping[str, Any], source: str):
        self.raw = raw
        self.source = source
        self.reasons: list[tuple[str, str]] = []

    def wrong(self, pointer: str, text: str) -> None:
        self.reasons.append((pointer, text))

    def block(self, key: str) -> Mapping[str, Any]:
        value = self.raw.get(key)
        if isinstance(value, Mapping):
            return value
        if value is not None and not (key == "zero_optimization" and isinstance(value, bool)):
            self.wrong(f"/{key}", f"is {_shape(value)}, but must be an object")
        return {}

    def batch(self, key: str) -> int | str | None:
        value = self.raw.get(key)
        if value is None or value == AUTO:
            return value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value) or value < 1:
            self.wrong(f"/{key}", f"is {_shape(value)}, but must be a whole number of at least 1")
            return None
        return int(value)

    def integer(
        self,
        block: Mapping[str, Any],
        name: str,
        key: str,
        default: int,
        low: int | None = None,
        high: int | None = None,
    ) -> int:
        value = self.number(block, name, key, default, low=low, high=high)
        if value != int(value):
            self.wrong(f"/{name}/{key}", f"is {value}, but must be a whole number")
            return default
        return int(value)

    def number(
        self,
        block: Mapping[str, Any],
        name: str,
        key: str,
        default: float,
        low: float | None = None,
        high: float | None = None,
    ) -> float:
        value = block.get(key, default)
        if value == AUTO:
            return default
        if isinstance(value, str):  # pydantic's lax mode takes "2"
            with contextlib.suppress(ValueError):
                value = float(value)
        if (
            isinstance(value, str)
            or not isinstance(value, (int, float))
            or value != value
            or abs(value) == float("inf")
        ):
            self.wrong(f"/{name}/{key}", f"is {_shape(value)}, but must be a number")
            return default
        if (low is not None and value < low) or (high is not None and value > high):
            if high is None:
                between = f"at least {low:g}"
            else:
                between = f"at most {high:g}" if low is None else f"{low:g} to {high:g}"
            self.wrong(f"/{name}/{key}", f"is {_shape(value)}, but must be {between}")
            return default
        return value

    def boolean(self, block: Mapping[str, Any], name: str, key: str, default: bool) -> bool:
        value = block.get(key, default)
        if value == AUTO:
            return default
        if isinstance(value, str) and value.lower() in ("true", "false", "yes", "no", "on", "off", "1", "0"):
            return value.lower() in ("true", "yes", "on", "1")
        if isinstance(value, (int, float)) and value in (0, 1):
            return bool(value)
        self.wrong(f"/{name}/{key}", f"is {_shape(value)}, but must be true or false")
        return default

    def named(self, key: str) -> Named | None:
        block = self.block(key)
        if not block:
            return None
        kind = block.get("type")
        if kind is None:
            return None
        if not isinstance(kind, str):
            self.wrong(f"/{key}/type", f"is {_shape(kind)}, but must be a name")
            return None
        params = block.get("params")
        if params is not None and not isinstance(params, Mapping):
            self.wrong(f"/{key}/params", f"is {_shape(params)}, but must be an object")
            params = {}
        return Named(type=kind, params=params or {})
