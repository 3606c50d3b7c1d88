"""DSP21x and DSP22x: in which type gradients are kept, added up and sent; loss scales out of proportion."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsplan.planner.rules.mechanism import ERROR, WARNING, Hit, rule
from dsplan.planner.rules.precision import bf16_block, number_at, on
from dsplan.schemas.known_keys import lookup
from dsplan.schemas.positions import Document, shape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dsplan.schemas.config import DsConfig

ACCUMULATION = "/data_types/grad_accum_dtype"
_NAMES = {
    "fp32": ("fp32", "float32", "float", "torch.float32"),
    "fp16": ("fp16", "float16", "half", "torch.float16"),
    "bf16": ("bf16", "bfloat16", "torch.bfloat16"),
    "int8": ("int8", "torch.int8"),
}
_TYPES = {name: short for short, names in _NAMES.items() for name in names}
"""Source: deepspeed/runtime/config.py, DtypeEnum."""


def precision_open(document: Document, reader: str) -> bool:
    """The reader is to fill the precision in."""
    return reader != "deepspeed" and "auto" in (document.at("/fp16/enabled"), document.at("/bf16/enabled"))


def accumulation_type(document: Document, mode: str) -> str | None:
    """The type in which gradients are added up: that of the mode where none is named; None where it is no type."""
    named = document.at(ACCUMULATION)
    if named is None:
        return mode
    return _TYPES.get(named) if isinstance(named, str) else None


def by_bf16_optimizer(document: Document, config: DsConfig, zero_stage: int) -> bool:
    """DeepSpeed's BF16_Optimizer does the work: stage 1 with fp32 accumulation and no offload to the host.

    Source: deepspeed/runtime/engine.py, _do_optimizer_sanity_check.
    """
    kept = accumulation_type(document, config.precision)
    offloaded = document.at("/zero_optimization/offload_optimizer/device") in ("cpu", "auto")
    return config.precision == "bf16" and zero_stage == 1 and kept == "fp32" and not offloaded


@rule("DSP210", "accumulation-type-at-stage-0", severity=ERROR, keys=[ACCUMULATION], raises="init")
def accumulation_type_at_stage_0(document: Document, config: DsConfig, zero_stage: int, reader: str) -> Iterator[Hit]:
    """At zero_stage 0 gradients must be added up in the type of the precision mode.

    Why:    The engine raises NotImplementedError when it starts. With ZeRO another type is taken.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": {"stage": 1}}
    Fix:    none
    Source: deepspeed/runtime/engine.py, _do_optimizer_sanity_check
    """
    kept, mode = accumulation_type(document, config.precision), config.precision
    if zero_stage == 0 and kept not in (None, mode) and not precision_open(document, reader):
        yield Hit(
            ACCUMULATION,
            f"data_types.grad_accum_dtype is {shape(document.at(ACCUMULATION))} under {mode}, which zero_stage 0 refuses",
            remedy=f"set {mode}, or set zero_optimization.stage to 1",
        )


@rule("DSP211", "narrow-accumulation", severity=WARNING, keys=[ACCUMULATION])
def narrow_accumulation(document: Document, config: DsConfig, zero_stage: int, reader: str) -> Iterator[Hit]:
    """Gradients should be added up in the type of the precision mode, or in fp32.

    Why:    DeepSpeed takes any type. fp16 overflows at 65504 where bf16 does not, 16-bit types lose what fp32 gradients
            hold, and int8 keeps whole numbers only.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp16"}, "zero_optimization": {"stage": 2}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": {"stage": 2}}
    Fix:    none
    Source: deepspeed/runtime/engine.py, get_data_types
    """
    kept, mode = accumulation_type(document, config.precision), config.precision
    if zero_stage > 0 and kept not in (None, mode, "fp32") and not precision_open(document, reader):
        yield Hit(
            ACCUMULATION,
            f"gradients of {mode} are added up in {kept}",
            remedy="set fp32" if mode == "fp32" else f"set {mode} or fp32",
        )


@rule("DSP212", "overflow-check-not-read", severity=WARNING, keys=["/bf16/check_grad_overflow"])
def overflow_check_not_read(document: Document, config: DsConfig, zero_stage: int) -> Iterator[Hit]:
    """bf16.check_grad_overflow is read at zero_stage 1 and 2 only.

    Why:    Stage 3 always checks. Stage 0, and stage 1 with bf16 and fp32 accumulation, never ask for it.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "bf16": {"enabled": true, "check_grad_overflow": false}, "zero_optimization": {"stage": 3}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "bf16": {"enabled": true, "check_grad_overflow": false}, "zero_optimization": {"stage": 2}}
    Fix:    none
    Source: deepspeed/runtime/engine.py, _configure_zero_optimizer
    """
    pointer = f"{bf16_block(document)}/check_grad_overflow"
    value = document.at(pointer)
    if not isinstance(value, bool) or config.precision != "bf16":
        return
    if zero_stage == 3 and not value:
        yield Hit(pointer, "bf16.check_grad_overflow is false, but zero_stage 3 always checks", remedy="remove it")
    elif value and (zero_stage == 0 or by_bf16_optimizer(document, config, zero_stage)):
        why = "at zero_stage 0" if zero_stage == 0 else "at zero_stage 1 with fp32 accumulation"
        yield Hit(pointer, f"bf16.check_grad_overflow is true, but nothing checks {why}", remedy="remove it")


@rule("DSP213", "immediate-update-not-read", severity=WARNING, keys=["/bf16/immediate_grad_update"])
def immediate_update_not_read(document: Document, config: DsConfig, zero_stage: int) -> Iterator[Hit]:
    """bf16.immediate_grad_update acts at zero_stage 1 with fp32 accumulation, and in a pipeline, only.

    Why:    Only DeepSpeed's BF16_Optimizer reads it, and it is built nowhere else.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "bf16": {"enabled": true, "immediate_grad_update": true}, "zero_optimization": {"stage": 2}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "bf16": {"enabled": true, "immediate_grad_update": true}, "zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}}
    Fix:    none
    Source: deepspeed/runtime/engine.py, _do_optimizer_sanity_check; deepspeed/runtime/bf16_optimizer.py
    """
    pointer = f"{bf16_block(document)}/immediate_grad_update"
    pipeline = document.has("/pipeline") or document.at("/dsplan/pipeline_stages", 1) not in (1, None)
    if not on(document, pointer) or config.precision != "bf16" or (zero_stage < 2 and pipeline):
        return
    if not by_bf16_optimizer(document, config, zero_stage):
        yield Hit(
            pointer, f"bf16.immediate_grad_update has no effect at zero_stage {zero_stage} here", remedy="remove it"
        )


@rule("DSP214", "state-type-overridden", severity=WARNING, keys=["/bf16/bf16_optimizer_states"])
def state_type_overridden(document: Document) -> Iterator[Hit]:
    """bf16_optimizer_states overrides fp32_optimizer_states of an offloaded Adam.

    Why:    DeepSpeed says so in its log, and keeps the moments in bf16.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "bf16": {"enabled": true, "bf16_master_weights_and_grads": true, "bf16_optimizer_states": true}, "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "fp32_optimizer_states": true}}, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "bf16": {"enabled": true, "bf16_master_weights_and_grads": true, "bf16_optimizer_states": true}, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    Fix:    none
    Source: deepspeed/runtime/engine.py, get_optimizer_configuration
    """
    states = on(document, f"{bf16_block(document)}/bf16_optimizer_states")
    pointer = "/optimizer/params/fp32_optimizer_states"
    if states and document.at(pointer) is True and document.at("/zero_optimization/offload_optimizer/device") == "cpu":
        yield Hit(
            pointer, "fp32_optimizer_states is true, but bf16_optimizer_states keeps them in bf16", remedy="keep one"
        )


_HIGH_POWER = 24
"""2**24 already takes gradients above 2**-8 = 0.004 out of fp16's range (65504, about 2**16)."""
_LONGEST_POWER, _FLOAT_POWER = 64, 1024
"""2**64 is no 64-bit integer, 2**1024 no float. Tried with DeepSpeed 0.19.8: OverflowError in the first step."""


@rule("DSP215", "scale-power-out-of-proportion", severity=WARNING, keys=["/fp16/initial_scale_power"])
def scale_power_out_of_proportion(document: Document, zero_stage: int) -> Iterator[Hit]:
    """fp16.initial_scale_power is an exponent of 2; fp16 itself ends at 2**16.

    Why:    From a start above 2**24 nearly every first step overflows and is skipped, and each skipped step only halves the
            scale. From 64 on (1024 at zero_stage 0) the first step raises an OverflowError: there it is an error.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "fp16": {"enabled": true, "initial_scale_power": 32}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "fp16": {"enabled": true, "initial_scale_power": 16}}
    Fix:    none
    Source: deepspeed/runtime/fp16/loss_scaler.py, DynamicLossScaler
    """
    power = number_at(document, "/fp16/initial_scale_power", 16.0)
    if not on(document, "/fp16/enabled") or number_at(document, "/fp16/loss_scale", 0.0) != 0 or power is None:
        return
    said = f"fp16.initial_scale_power is {power:g}"
    if power >= (_FLOAT_POWER if zero_stage == 0 else _LONGEST_POWER):
        yield Hit(
            "/fp16/initial_scale_power",
            f"{said}: a loss scale of 2**{power:g} overflows in the first step",
            remedy="set 16",
            severity=ERROR,
            raises="step",
        )
    elif power > _HIGH_POWER:
        yield Hit(
            "/fp16/initial_scale_power",
            f"{said}: training starts with about {power - 16:g} skipped steps, until the loss scale is down to 2**16",
            remedy="set 16",
        )


@rule("DSP216", "scale-below-its-floor", severity=WARNING, keys=["/fp16/min_loss_scale"])
def scale_below_its_floor(document: Document) -> Iterator[Hit]:
    """fp16.min_loss_scale should not be above the scale that training starts with.

    Why:    DeepSpeed does not compare them. The scale starts below its floor, and the first overflow raises it.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "fp16": {"enabled": true, "initial_scale_power": 8, "min_loss_scale": 1000}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "fp16": {"enabled": true, "initial_scale_power": 16, "min_loss_scale": 1}}
    Fix:    none
    Source: deepspeed/runtime/fp16/loss_scaler.py, DynamicLossScaler
    """
    power = number_at(document, "/fp16/initial_scale_power", 16.0)
    floor = number_at(document, "/fp16/min_loss_scale", 1.0)
    if not on(document, "/fp16/enabled") or number_at(document, "/fp16/loss_scale", 0.0) != 0:
        return
    if power is not None and floor is not None and abs(power) < _FLOAT_POWER and floor > 2.0**power:
        yield Hit(
            "/fp16/min_loss_scale",
            f"fp16.min_loss_scale is {floor:g}, above the first scale, 2**{power:g} = {2.0**power:g}",
            remedy=f"set {max(2.0**power, 1):g} or less",
        )


@rule("DSP217", "autocast-without-type", severity=WARNING, keys=["/torch_autocast/dtype"])
def autocast_without_type(document: Document) -> Iterator[Hit]:
    """torch_autocast should name its dtype.

    Why:    Without one, autocast takes the default of the device, fp16 on a GPU, and at zero_stage 0 DeepSpeed makes a
            gradient scaler only where the file says fp16.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "torch_autocast": {"enabled": true}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "torch_autocast": {"enabled": true, "dtype": "bf16"}}
    Fix:    none
    Source: deepspeed/runtime/engine.py, DeepSpeedEngine.__init__; torch/amp/autocast_mode.py, autocast.__init__
    """
    if document.at("/torch_autocast/enabled") is True and document.at("/torch_autocast/dtype") is None:
        yield Hit(
            "/torch_autocast",
            "torch_autocast has no dtype, so it takes the device's default (fp16 on a GPU)",
            remedy='add "dtype": "bf16"',
            on_key=True,
        )


COMMUNICATION, SEQUENCE = "/communication_data_type", "/seq_parallel_communication_data_type"


@rule("DSP218", "narrow-communication", severity=WARNING, keys=[COMMUNICATION])
def narrow_communication(document: Document, config: DsConfig, reader: str) -> Iterator[Hit]:
    """communication_data_type fp16 should not carry gradients of bf16 or fp32.

    Why:    DeepSpeed casts gradients to it before they are reduced. fp16 ends at 65504, and without fp16 mode no loss scale
            and no overflow check keeps them below.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "communication_data_type": "fp16", "bf16": {"enabled": true}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "communication_data_type": "fp32", "bf16": {"enabled": true}}
    Fix:    none
    Source: deepspeed/runtime/engine.py, allreduce_bucket; deepspeed/runtime/zero/stage_1_and_2.py
    """
    kind, autocast = document.at(COMMUNICATION), document.at("/torch_autocast/enabled")
    if not isinstance(kind, str) or kind.lower() != "fp16" or precision_open(document, reader) or autocast:
        return
    if config.precision != "fp16":
        yield Hit(
            COMMUNICATION,
            f"gradients of {config.precision} are sent as fp16, which ends at 65504",
            remedy=f"set {config.precision}, or remove it",
        )


@rule("DSP219", "communication-type-not-read", severity=WARNING, keys=[COMMUNICATION, SEQUENCE])
def communication_type_not_read(document: Document) -> Iterator[Hit]:
    """Under sequence parallelism seq_parallel_communication_data_type counts, not communication_data_type.

    Why:    With sequence_parallel_size above 1 the engine replaces the one by the other, whose default is fp32.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "sequence_parallel_size": 2, "communication_data_type": "bf16"}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "sequence_parallel_size": 2, "seq_parallel_communication_data_type": "bf16"}
    Fix:    none
    Source: deepspeed/runtime/engine.py, _configure_distributed_model
    """
    share = document.at("/sequence_parallel_size", 1)
    if isinstance(share, int) and share > 1 and document.at(COMMUNICATION) is not None:
        default = "" if document.has(SEQUENCE) else " (fp32 where it is absent)"
        yield Hit(
            COMMUNICATION,
            f"communication_data_type is not read with sequence_parallel_size {share}; "
            f"seq_parallel_communication_data_type is{default}",
            remedy="set seq_parallel_communication_data_type",
            on_key=True,
        )


_ACTS_WHEN_OFF = {
    "auto_cast",
    "fp16_master_weights_and_grads",
    "bf16_master_weights_and_grads",
    "bf16_optimizer_states",
}
"""Keys of fp16 and bf16 that DeepSpeed looks at whether the block is on or not. Source: deepspeed/runtime/config.py."""


@rule("DSP220", "precision-not-enabled", severity=WARNING, keys=["/fp16/enabled", "/bf16/enabled"])
def precision_not_enabled(document: Document) -> Iterator[Hit]:
    """fp16 and bf16 are off unless enabled is there, whatever else the block says.

    Why:    enabled is false where it is absent, so loss scales and the like go unused, and training runs in fp32.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "fp16": {"loss_scale": 0, "initial_scale_power": 16}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 16}}
    Fix:    none
    Source: deepspeed/runtime/precision_config.py
    """
    for pointer in ("/fp16", bf16_block(document)):
        block = document.at(pointer)
        if not isinstance(block, dict) or "enabled" in block or _ACTS_WHEN_OFF & block.keys():
            continue
        known = [name for name in block if name in (lookup(pointer) or {}).get("properties", {})]
        if known and len(known) == len(block):  # a misspelt enabled is another finding
            yield Hit(
                pointer,
                f"{pointer[1:]} has {known[0]} but no enabled, so it is off",
                remedy='add "enabled": true, or remove the block',
                on_key=True,
            )
