"""DSP2xx: fp16, bf16, autocast, loss scaling, clipping."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dsplan.planner.rules.mechanism import ERROR, INFO, WARNING, Hit, rule
from dsplan.planner.rules.near_names import nearest
from dsplan.schemas.positions import Document, shape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dsplan.schemas.config import DsConfig


def on(document: Document, pointer: str) -> bool:
    """A switch of a checked block, as DeepSpeed coerces it."""
    value = document.at(pointer)
    return value in (True, 1) or (isinstance(value, str) and value.lower() in ("1", "on", "t", "true", "y", "yes"))


def number_at(document: Document, pointer: str, default: float) -> float | None:
    """A number there (a numeric text too), the default where it is absent or "auto", None where it is no number."""
    value: Any = document.at(pointer, default)
    if value == "auto":
        return default
    try:
        return None if isinstance(value, bool) or value is None else float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def bf16_block(document: Document) -> str:
    """The block that DeepSpeed reads: bfloat16 only where bf16 is absent or null."""
    return "/bf16" if document.at("/bf16") is not None else "/bfloat16"


@rule("DSP201", "fp16-and-bf16", severity=ERROR, keys=["/fp16/enabled", "/bf16/enabled"], raises="parse")
def fp16_and_bf16(document: Document) -> Iterator[Hit]:
    """Only one of fp16 and bf16 may be on.

    Why:    DeepSpeed asserts it at start-up.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "fp16": {"enabled": true}, "bf16": {"enabled": true}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "fp16": {"enabled": false}, "bf16": {"enabled": true}}
    Fix:    none
    Source: deepspeed/runtime/config.py, _initialize_params
    """
    other = f"{bf16_block(document)}/enabled"
    if on(document, "/fp16/enabled") and on(document, other):
        yield Hit(other, "fp16 and bf16 are both enabled, but only one can be", remedy="switch one of them off")


@rule("DSP202", "clipping-by-default", severity=INFO, keys=["/gradient_clipping"])
def clipping_by_default(document: Document) -> Iterator[Hit]:
    """gradient_clipping should be written out: its default has changed.

    Why:    Absent meant no clipping until June 2026, and means 1.0 since. An old file silently trains another way.
    Since:  0.19.3
    Bad:    {"train_batch_size": 8}
    Good:   {"train_batch_size": 8, "gradient_clipping": 0}
    Fix:    none
    Source: deepspeed/runtime/constants.py, GRADIENT_CLIPPING_DEFAULT; github.com/deepspeedai/DeepSpeed/pull/8068
    """
    keys = document.value if isinstance(document.value, dict) else {}
    if keys and not any(key == "gradient_clipping" or nearest(key, ["gradient_clipping"]) for key in keys):
        yield Hit(
            "",
            "gradient_clipping is not set; DeepSpeed clips at 1.0 (before June 2026 it did not clip)",
            remedy="write 1.0, or 0 for none",
        )


@rule("DSP203", "bfloat16-beside-bf16", severity=WARNING, keys=["/bfloat16"])
def bfloat16_beside_bf16(document: Document) -> Iterator[Hit]:
    """bfloat16 is the old name of bf16, and is not read beside it.

    Why:    DeepSpeed reads bfloat16 only where bf16 is absent or null. Beside it, it is not even checked.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "bf16": {"enabled": false}, "bfloat16": {"enabled": true}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "bf16": {"enabled": true}}
    Fix:    none
    Source: deepspeed/runtime/precision_config.py, get_bfloat16_config
    """
    if document.at("/bf16") is not None and document.has("/bfloat16"):
        state = "on" if on(document, "/bf16/enabled") else "off"
        yield Hit(
            "/bfloat16", f"bfloat16 is not read beside bf16; bf16 is {state}", remedy="remove bfloat16", on_key=True
        )


@rule("DSP204", "fixed-loss-scale", severity=WARNING, keys=["/fp16/loss_scale"])
def fixed_loss_scale(document: Document) -> Iterator[Hit]:
    """A fixed fp16 loss scale skips every step that overflows, and never adapts.

    Why:    loss_scale above 0 switches dynamic scaling off: the scale stays, and the keys of dynamic scaling have no effect.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "fp16": {"enabled": true, "loss_scale": 8}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "fp16": {"enabled": true, "loss_scale": 0}}
    Fix:    none
    Source: deepspeed/runtime/fp16/loss_scaler.py
    """
    scale = number_at(document, "/fp16/loss_scale", 0.0)
    if on(document, "/fp16/enabled") and scale is not None and scale > 0:
        dynamic = ("initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale")
        idle = [name for name in dynamic if document.has(f"/fp16/{name}")]
        more = f"; {', '.join(idle)} {'has' if len(idle) == 1 else 'have'} no effect" if idle else ""
        yield Hit(
            "/fp16/loss_scale",
            f"fp16.loss_scale is fixed at {scale:g}: a step that overflows is skipped and the scale stays{more}",
            remedy="set 0 for dynamic scaling",
        )


@rule(
    "DSP205",
    "loss-scale-floor",
    severity=ERROR,
    keys=["/fp16/min_loss_scale", "/fp16/loss_scale_window"],
    raises="parse",
)
def loss_scale_floor(document: Document) -> Iterator[Hit]:
    """With dynamic loss scaling, min_loss_scale and loss_scale_window must be at least 1.

    Why:    DeepSpeed refuses the fp16 block at start-up.
    Since:  0.19.3
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "fp16": {"enabled": true, "min_loss_scale": 0}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "fp16": {"enabled": true, "min_loss_scale": 1}}
    Fix:    none
    Source: deepspeed/runtime/precision_config.py, DeepSpeedFP16Config
    """
    if not on(document, "/fp16/enabled") or number_at(document, "/fp16/loss_scale", 0.0) != 0:
        return
    for name in ("min_loss_scale", "loss_scale_window"):
        value = number_at(document, f"/fp16/{name}", 1.0)
        if value is not None and value <= 0 and value == int(value):
            yield Hit(
                f"/fp16/{name}",
                f"fp16.{name} is {value:g}, but must be at least 1 with dynamic loss scaling",
                remedy="set 1 or more",
            )


@rule("DSP206", "auto-cast-without-fp16", severity=ERROR, keys=["/fp16/auto_cast"], raises="step")
def auto_cast_without_fp16(document: Document) -> Iterator[Hit]:
    """fp16.auto_cast acts even where fp16 is off.

    Why:    It casts the inputs of forward to half; with weights of another type the first forward raises.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "fp16": {"enabled": false, "auto_cast": true}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "fp16": {"enabled": true, "auto_cast": true}}
    Fix:    none
    Source: deepspeed/runtime/engine.py, fp16_auto_cast
    """
    if on(document, "/fp16/auto_cast") and not on(document, "/fp16/enabled") and document.at("/fp16/enabled") != "auto":
        yield Hit(
            "/fp16/auto_cast",
            "fp16.auto_cast casts inputs to half though fp16 is off; the first forward fails on weights of another type",
            remedy="set false, or enable fp16",
        )


_MODE_NAMES = {
    "fp32": ("fp32", "float32", "float", "torch.float32"),
    "fp16": ("fp16", "float16", "half", "torch.float16"),
    "bf16": ("bf16", "bfloat16", "torch.bfloat16"),
}


@rule("DSP207", "param-type-unlike-mode", severity=ERROR, keys=["/data_types/param_dtype"], raises="init")
def param_type_unlike_mode(document: Document, config: DsConfig, reader: str) -> Iterator[Hit]:
    """data_types.param_dtype must be that of the precision mode.

    Why:    DeepSpeed asserts it when the engine starts.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "bf16": {"enabled": true}, "data_types": {"param_dtype": "fp16"}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "bf16": {"enabled": true}, "data_types": {"param_dtype": "bf16"}}
    Fix:    none
    Source: deepspeed/runtime/engine.py
    """
    wanted = document.at("/data_types/param_dtype")
    filled = reader != "deepspeed" and "auto" in (document.at("/fp16/enabled"), document.at("/bf16/enabled"))
    if not isinstance(wanted, str) or filled or not any(wanted in names for names in _MODE_NAMES.values()):
        return
    if wanted not in _MODE_NAMES[config.precision]:
        yield Hit(
            "/data_types/param_dtype",
            f"data_types.param_dtype is {shape(wanted)}, but the precision mode is {config.precision}",
            remedy=f"set {config.precision}, or remove it",
        )


@rule(
    "DSP208",
    "sixteen-bit-masters",
    severity=ERROR,
    keys=["/fp16/fp16_master_weights_and_grads", "/bf16"],
    raises="init",
)
def sixteen_bit_masters(document: Document, zero_stage: int, config: DsConfig) -> Iterator[Hit]:
    """16-bit master weights need zero_stage 1 or more and an offloaded optimizer.

    Why:    DeepSpeed asserts it, even where that precision is off. bf16_optimizer_states in turn needs
            bf16_master_weights_and_grads, and then no offload.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "bf16": {"enabled": true, "bf16_master_weights_and_grads": true}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "bf16": {"enabled": true}}
    Fix:    none
    Source: deepspeed/runtime/config.py, _initialize_params; deepspeed/runtime/engine.py
    """
    bf16 = bf16_block(document)
    states = on(document, f"{bf16}/bf16_optimizer_states")
    for pointer in ("/fp16/fp16_master_weights_and_grads", f"{bf16}/bf16_master_weights_and_grads"):
        if not on(document, pointer):
            continue
        name = pointer.strip("/").replace("/", ".")
        if zero_stage == 0:
            yield Hit(
                pointer,
                f"{name} is on at zero_stage 0, but needs zero_stage 1 or more",
                remedy="set false",
                raises="parse",
            )
        elif (
            config.offload == "none"
            and not (states and pointer.startswith(bf16))
            and not document.has("/zero_optimization/cpu_offload")
        ):
            yield Hit(
                pointer,
                f"{name} is on, but needs offload_optimizer with device cpu",
                remedy="set false, or offload the optimizer",
            )
    if states and not on(document, f"{bf16}/bf16_master_weights_and_grads"):
        yield Hit(
            f"{bf16}/bf16_optimizer_states",
            "bf16_optimizer_states is on, but needs bf16_master_weights_and_grads",
            remedy="set both, or none",
            raises="parse",
        )


@rule("DSP209", "autocast-beside-mixed-precision", severity=WARNING, keys=["/torch_autocast/enabled"])
def autocast_beside_mixed_precision(document: Document, config: DsConfig) -> Iterator[Hit]:
    """torch_autocast beside fp16 or bf16 applies both.

    Why:    DeepSpeed does not object: weights are cast by the one, operators by the other.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "bf16": {"enabled": true}, "torch_autocast": {"enabled": true, "dtype": "bf16"}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "torch_autocast": {"enabled": true, "dtype": "bf16"}}
    Fix:    none
    Source: deepspeed/runtime/engine.py
    """
    if document.at("/torch_autocast/enabled") is True and config.precision != "fp32":
        yield Hit(
            "/torch_autocast/enabled",
            f"torch_autocast and {config.precision} are both on, and both act",
            remedy="keep one of the two",
        )
