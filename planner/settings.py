"""What to estimate for: every value with where it came from (flag > --args > --config > script > default)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dsplan.schemas.choices import OPTIMIZERS, OptimizerSpec, ZeroKnobs, optimizer_named
from dsplan.schemas.cluster import Cluster
from dsplan.schemas.companion import Companion
from dsplan.schemas.config import AUTO, DsConfig, optimizer_spec
from dsplan.schemas.plan import Engine
from dsplan.schemas.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """What the command line named; None or empty: not named."""

    zero: tuple[int, ...] | None = None
    precision: tuple[str, ...] | None = None
    tp: tuple[int, ...] | None = None
    pp: tuple[int, ...] | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    seq_len: int | None = None
    recompute: str | None = None
    offload: str | None = None
    optimizer: str | None = None
    engine: Engine | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The fixed values, the lists to vary, and the origin of each. None in a list's place: the contract's default range."""

    engine: Engine
    zero: tuple[int, ...]
    precision: tuple[str, ...]
    tp: tuple[int, ...] | None
    pp: tuple[int, ...] | None
    global_batch: int | None
    micro_batch: int | None
    accumulation: int | None
    seq_len: int | None
    recompute: str
    offload: str
    optimizer: OptimizerSpec
    knobs: ZeroKnobs
    has_config: bool
    """The user's own configuration is among what is asked for: its row comes first and decides the exit code."""
    own_zero: int | None
    own_precision: str | None
    origins: tuple[tuple[str, str, str], ...] = field(default=())


def settle(
    flags: Flags,
    *,
    cluster: Cluster,
    companion: Companion | None = None,
    config: DsConfig | None = None,
    script_config: DsConfig | None = None,
    script_micro_batch: int | None = None,
    script_optimizer: OptimizerSpec | None = None,
    hidden_size: int | None = None,
    needs_batch: bool = True,
) -> Settings:
    """Settings from all that is known. Problem naming every "auto" that nothing fills.

    needs_batch: a configuration without any batch size is asked for one.
    """
    own = config or script_config
    own_origin = "--config" if config else "script"
    origins: list[tuple[str, str, str]] = []
    asked: list[str] = []

    def choose(name: str, *sources: tuple[Any, str], default: Any) -> Any:
        for value, origin in sources:
            if value is not None:
                origins.append((name, str(value), origin))
                return value
        origins.append((name, str(default), "default"))
        return default

    def filled(value: Any, name: str, how: str, otherwise: Any) -> Any:
        """A batch value of the config; an "auto" must be given by another source."""
        if value != AUTO:
            return value
        if otherwise is None:
            asked.append(f'{name} is "auto": give {how} or --args')
        return None

    told = companion or Companion(kind="trainer", source="")
    raw: Mapping[str, Any] = own.raw if own else {}
    unfilled = set(own.unfilled) if own else set()
    if "/zero_optimization/stage" in unfilled and flags.zero is None and told.zero_stage is None:
        asked.append('zero_optimization.stage is "auto": give --zero or --args')
    if {"/fp16/enabled", "/bf16/enabled"} & unfilled and not flags.precision and told.precision is None:
        names = " and ".join(p[1:].replace("/", ".") for p in sorted({"/fp16/enabled", "/bf16/enabled"} & unfilled))
        asked.append(f'{names} "auto": give --precision or --args')

    micro_known = flags.micro_batch or told.micro_batch
    micro_batch = choose(
        "micro_batch",
        (flags.micro_batch, "flag"),
        (told.micro_batch, "--args"),
        (script_micro_batch, "script"),
        (
            filled(own.micro_batch, "train_micro_batch_size_per_gpu", "--micro-batch", micro_known) if own else None,
            own_origin,
        ),
        default=None,
    )
    accumulation = choose(
        "accumulation",
        (flags.accumulation, "flag"),
        (told.accumulation, "--args"),
        (
            filled(
                own.accumulation,
                "gradient_accumulation_steps",
                "--accumulation",
                flags.accumulation or told.accumulation,
            )
            if own
            else None,
            own_origin,
        ),
        default=None,
    )
    global_batch = own.train_batch_size if own else None
    if global_batch == AUTO:
        global_batch = None  # it follows from the other two
    if config and needs_batch and micro_batch is None and global_batch is None and not asked:
        asked.append("names no batch size: give --micro-batch or --args")
    named = flags.micro_batch or told.micro_batch or flags.accumulation or told.accumulation
    if script_micro_batch is not None or (named and micro_batch is not None and accumulation is not None):
        global_batch = None  # it follows from what is fed, or from the other two where one of them was named
    zero = choose(
        "zero_stage",
        (flags.zero, "flag"),
        ((told.zero_stage,) if told.zero_stage is not None else None, "--args"),
        ((config.zero_stage,) if config else None, own_origin),
        default=(0, 1, 2, 3),
    )
    precision = choose(
        "precision",
        (flags.precision, "flag"),
        ((told.precision,) if told.precision else None, "--args"),
        ((own.precision,) if own else None, own_origin),
        default=("bf16",),
    )
    recompute = choose(
        "recompute",
        (flags.recompute, "flag"),
        (told.recompute, "--args"),
        (own.recompute if own and "dsplan" in raw else None, own_origin),
        default="none",
    )
    offload = choose(
        "offload",
        (flags.offload, "flag"),
        (told.offload, "--args"),
        (own.offload if own and own.offload != "none" else None, own_origin),
        default="none",
    )
    spec = choose(
        "optimizer",
        (_named(flags.optimizer), "flag"),
        (script_optimizer, "script"),
        (_named(told.optimizer), "--args"),
        (optimizer_spec(own) if own else None, own_origin),
        default=OptimizerSpec(),
    )
    if own and own.optimizer and optimizer_spec(own) is None and flags.optimizer is None and script_optimizer is None:
        asked.append(f'optimizer.type "{own.optimizer.type}" is not known to the memory model: give --optimizer')
    if asked:
        raise Problem(f"{own.source if own else 'config'}: {'; '.join(asked)}")
    return Settings(
        engine=flags.engine or ("deepspeed" if config else "native"),
        zero=zero,
        precision=precision,
        tp=flags.tp or ((_degree(raw, "tensor_parallel", "autotp_size"),) if config else None),
        pp=flags.pp or ((_degree(raw, "dsplan", "pipeline_stages"),) if config else None),
        global_batch=global_batch if isinstance(global_batch, int) else None,
        micro_batch=micro_batch,
        accumulation=accumulation,
        seq_len=flags.seq_len or told.seq_len,
        recompute=recompute,
        offload=offload,
        optimizer=spec,
        knobs=_knobs(own, unfilled, hidden_size),
        has_config=config is not None,
        own_zero=None if own is None else flags.zero[0] if flags.zero and len(flags.zero) == 1 else own.zero_stage,
        own_precision=None if own is None else precision[0] if len(precision) == 1 else own.precision,
        origins=tuple(origins),
    )


def _degree(raw: Mapping[str, Any], block: str, key: str) -> int:
    inner = raw.get(block)
    value = inner.get(key, 1) if isinstance(inner, Mapping) else 1
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise Problem(f"config: {block}.{key} is {value!r}, but must be a whole number")
    return max(value, 1)


def _named(name: str | None) -> OptimizerSpec | None:
    if name is None:
        return None
    spec = optimizer_named(name)
    if spec is None:
        raise Problem(
            f"--optimizer {name} is not known; choose from {', '.join(OPTIMIZERS)}, sgd-momentum; with -8bit or -bf16 for "
            "states of that kind"
        )
    return spec


def _knobs(own: DsConfig | None, unfilled: set[str], hidden_size: int | None) -> ZeroKnobs:
    """ZeRO's sizes; the three that HF Trainer fills by the hidden size are filled so.

    Source: transformers/integrations/deepspeed.py, trainer_config_finalize: h*h, 0.9*h*h, 10*h.
    """
    if own is None:
        return ZeroKnobs()
    knobs = own.knobs
    if hidden_size is None:
        return knobs

    def sized(key: str, otherwise: int, by_hidden: int) -> int:
        return by_hidden if f"/zero_optimization/{key}" in unfilled else otherwise

    square = hidden_size * hidden_size
    return replace(
        knobs,
        reduce_bucket_size=sized("reduce_bucket_size", knobs.reduce_bucket_size, square),
        prefetch_bucket_size=sized("stage3_prefetch_bucket_size", knobs.prefetch_bucket_size, int(0.9 * square)),
        param_persistence_threshold=sized(
            "stage3_param_persistence_threshold", knobs.param_persistence_threshold, 10 * hidden_size
        ),
    )
