"""What to estimate for: every value with where it came from (flag > --args > --config > script > default)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dsplan.schemas.choices import (
    OPTIMIZERS,
    PIPELINE_SCHEDULES,
    Built,
    OptimizerSpec,
    PipelineSchedule,
    ZeroKnobs,
    optimizer_named,
)
from dsplan.schemas.cluster import Cluster
from dsplan.schemas.companion import Companion
from dsplan.schemas.config import AUTO, DsConfig, optimizer_spec
from dsplan.schemas.offloading import offloading
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
    sp: int | None = None
    dp_replicate: int | None = None
    schedule: str | None = None
    """gpipe, 1f1b, or interleaved:N with N virtual stages."""
    sequence_parallel: bool | None = None
    built: Built | None = None


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
    source: str = ""
    """The configuration's file."""
    origins: tuple[tuple[str, str, str], ...] = field(default=())
    sp: int = 1
    dp_replicate: int = 1
    schedule: PipelineSchedule = "1f1b"
    virtual_stages: int = 1
    sequence_parallel: bool = False
    built: Built | None = None
    """None: by zero_stage, as `built_at_3` says; whole on every host below 3."""
    built_at_3: Built = "host"
    notes: tuple[str, ...] = ()
    """Where --args and the configuration give a value that differs: both, and which is used."""


def settle(
    flags: Flags,
    *,
    cluster: Cluster,
    companion: Companion | None = None,
    config: DsConfig | None = None,
    script_config: DsConfig | None = None,
    script_micro_batch: int | None = None,
    script_optimizer: OptimizerSpec | None = None,
    built_at_3: Built = "host",
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
        (_own_offload(own, flags.engine or ("deepspeed" if config else "native")) if own else None, own_origin),
        default="none",
    )
    spec = choose(
        "optimizer",
        (named_optimizer(flags.optimizer), "flag"),
        (script_optimizer, "script"),
        (named_optimizer(told.optimizer), "--args"),
        (optimizer_spec(own) if own else None, own_origin),
        default=OptimizerSpec(),
    )
    if own and own.optimizer and optimizer_spec(own) is None and flags.optimizer is None and script_optimizer is None:
        asked.append(f'optimizer.type "{own.optimizer.type}" is not known to the memory model: give --optimizer')
    if asked:
        raise Problem(f"{own.source if own else 'config'}: {'; '.join(asked)}")
    schedule, virtual_stages = read_schedule(flags, raw if config else {})
    parallel = flags.sequence_parallel
    return Settings(
        engine=flags.engine or ("deepspeed" if config else "native"),
        zero=zero,
        precision=precision,
        tp=flags.tp or ((_degree(raw, "dsplan.tensor_parallel", "tensor_parallel.autotp_size"),) if config else None),
        pp=flags.pp or ((_degree(raw, "dsplan.pipeline_stages", "pipeline.stages"),) if config else None),
        sp=flags.sp or (_degree(raw, "sequence_parallel_size") if config else 1),
        dp_replicate=flags.dp_replicate or (_degree(raw, "dsplan.dp_replicate") if config else 1),
        schedule=schedule,
        virtual_stages=virtual_stages,
        sequence_parallel=_switch(raw, "dsplan.sequence_parallel") if parallel is None and config else bool(parallel),
        built=flags.built,
        built_at_3=built_at_3,
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
        source=own.source if own else "",
        origins=tuple(origins),
        notes=tuple(_unlike(flags, companion, own)) if companion and own else (),
    )


def _own_offload(own: DsConfig, engine: Engine) -> str | None:
    """What the file offloads, as that engine reads it; None: nothing."""
    offload = offloading(own.raw, own.zero_stage).what if engine == "native" else own.offload
    return None if offload == "none" else offload


def _unlike(flags: Flags, told: Companion, own: DsConfig) -> Iterator[str]:
    """Where --args and the configuration differ and no flag decides: both values, and which is used.

    Source: the rules DSP020, DSP022 and DSP027 of lint, which say what Trainer and Accelerate do then.
    """
    trainer = told.kind != "accelerate"
    refuses = "the Trainer refuses such a pair"
    precision = own.precision if own.precision != "fp32" or _says_no_half(own.raw) else None
    stage = _at(own.raw, "zero_optimization.stage")
    for name, flag, said, written, then in (
        ("micro_batch", flags.micro_batch, told.micro_batch, own.micro_batch, "" if told.finds_batch else refuses),
        ("accumulation", flags.accumulation, told.accumulation, own.accumulation, refuses),
        ("precision", flags.precision, told.precision, precision, refuses),
        ("zero_stage", flags.zero, told.zero_stage, stage, refuses),
    ):
        if flag is not None or None in (said, written) or written == AUTO or said == written:
            continue
        if not trainer and name != "precision":
            then = f"Accelerate itself takes {own.source}'s"
        elif not trainer:
            then = "Accelerate refuses such a pair"
        lint = f" ({then}: dsplan lint --args says so)" if then else ""
        yield f"{name} {said} from --args {told.source}, not {written} from {own.source}{lint}"


def _says_no_half(raw: Mapping[str, Any]) -> bool:
    """Whether the file itself switches fp16 or bf16 off, and leaves neither to be filled."""
    said = [_at(raw, "fp16.enabled"), _at(raw, "bf16.enabled")]
    return False in said and AUTO not in said


def _at(raw: Mapping[str, Any], key: str) -> Any:
    """The value at "block.key"; None: not there."""
    value: Any = raw
    for step in key.split("."):
        value = value.get(step) if isinstance(value, Mapping) else None
    return value


def _degree(raw: Mapping[str, Any], *keys: str) -> int:
    """The largest that the keys say; 1 where none does."""
    most = 1
    for key in keys:
        value = _at(raw, key)
        if value is None or (value == "auto" and key == "pipeline.stages"):
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise Problem(f"config: {key} is {value!r}, but must be a whole number")
        most = max(most, value)
    return most


def _switch(raw: Mapping[str, Any], key: str) -> bool:
    value = _at(raw, key)
    if value not in (None, True, False):
        raise Problem(f"config: {key} is {value!r}, but must be true or false")
    return value is True


def read_schedule(flags: Flags, raw: Mapping[str, Any]) -> tuple[PipelineSchedule, int]:
    """(schedule, virtual stages). Problem where it cannot be read."""
    if flags.schedule is not None:
        source, text = "--schedule", flags.schedule
    else:
        source, text = "config: dsplan.pipeline_schedule", _at(raw, "dsplan.pipeline_schedule") or "1f1b"
    name, colon, number = str(text).partition(":")
    virtual = int(number) if number.isdigit() else 2
    whole = not colon or (name == "interleaved" and number.isdigit() and virtual >= 2)
    if name not in PIPELINE_SCHEDULES or not whole:
        raise Problem(f"{source} {text} cannot be read; write gpipe, 1f1b, or interleaved:N with N >= 2 virtual stages")
    return name, virtual if name == "interleaved" else 1


def named_optimizer(name: str | None) -> OptimizerSpec | None:
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
