"""What the HF Trainer and Accelerate put in the place of "auto", and where they have it from.

Sources: transformers/integrations/deepspeed.py (trainer_config_process, trainer_config_finalize) of 5.24;
accelerate/utils/dataclasses.py (DeepSpeedPlugin) and accelerate/accelerator.py (_prepare_deepspeed) of 1.15.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dsplan.schemas.companion import Companion

ZERO = "/zero_optimization"
PARAMS = "/optimizer/params"
SCHEDULE = "/scheduler/params"

TRAINER_DEFAULTS: Mapping[str, Any] = {
    "micro_batch": 8,
    "accumulation": 1,
    "gradient_clipping": 1.0,
    "learning_rate": 5e-5,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "weight_decay": 0.0,
    "precision": "fp32",
}
"""Source: transformers/training_args.py of 5.24, the fields' defaults; LLaMA-Factory takes the same class."""

ACCELERATE_FILLS = {
    "/train_batch_size",
    "/train_micro_batch_size_per_gpu",
    "/gradient_accumulation_steps",
    "/gradient_clipping",
    f"{ZERO}/stage",
    f"{ZERO}/offload_optimizer/device",
    f"{ZERO}/offload_optimizer/nvme_path",
    f"{ZERO}/offload_param/device",
    f"{ZERO}/offload_param/nvme_path",
    f"{ZERO}/stage3_gather_16bit_weights_on_model_save",
    f"{ZERO}/reduce_bucket_size",
    f"{ZERO}/stage3_prefetch_bucket_size",
    f"{ZERO}/stage3_param_persistence_threshold",
    "/fp16/enabled",
    "/bf16/enabled",
    f"{PARAMS}/lr",
    f"{PARAMS}/weight_decay",
    f"{SCHEDULE}/warmup_min_lr",
    f"{SCHEDULE}/warmup_max_lr",
    f"{SCHEDULE}/warmup_num_steps",
    f"{SCHEDULE}/total_num_steps",
}
"""The "auto" values that Accelerate's own loop can fill. Those of optimizer and scheduler need a DummyOptim or
DummyScheduler in the script."""

PLUGIN_FILLS = {
    f"{ZERO}/stage": 2,
    f"{ZERO}/offload_optimizer/device": "none",
    f"{ZERO}/offload_optimizer/nvme_path": "none",
    f"{ZERO}/offload_param/device": "none",
    f"{ZERO}/offload_param/nvme_path": "none",
    f"{ZERO}/stage3_gather_16bit_weights_on_model_save": False,
}
"""What Accelerate fills in for the Trainer, whose TrainingArguments hand it the file. Its environment can say otherwise
(ACCELERATE_DEEPSPEED_ZERO_STAGE and the like). Source: accelerate/utils/dataclasses.py of 1.15, DeepSpeedPlugin.__post_init__;
transformers/training_args.py of 5.24, __post_init__."""

HIDDEN_SIZE_KEYS = (
    f"{ZERO}/reduce_bucket_size",
    f"{ZERO}/stage3_prefetch_bucket_size",
    f"{ZERO}/stage3_param_persistence_threshold",
)
"""Filled by the model's hidden size."""


@dataclass(frozen=True, slots=True)
class Filled:
    """A value that a reader fills in. origin names the argument that it is from."""

    value: Any
    origin: str


def filled_values(
    companion: Companion,
    *,
    ranks: int | None = None,
    stage: Any = None,
    hidden_size: int | None = None,
    own: Mapping[str, Any] | None = None,
) -> dict[str, Filled]:
    """What stands in the place of "auto", by pointer; a pointer that is absent is not known.

    ranks: all of them, as the Trainer counts. stage: as the file has it. own: the file's object, for its batch values.
    """
    accelerate = companion.kind == "accelerate"
    table = _accelerate(companion) if accelerate else _trainer(companion, ranks)
    if accelerate and ranks is not None and own:
        table |= _product(own, table, ranks)
    return table | by_hidden_size(stage, hidden_size, any_stage=accelerate)


def by_hidden_size(stage: Any, hidden_size: int | None, *, any_stage: bool = False) -> dict[str, Filled]:
    """Source: trainer_config_finalize: h*h, int(0.9*h*h), 10*h; the last two at stage 3 alone."""
    if hidden_size is None:
        return {}
    square = hidden_size * hidden_size
    values = (square, int(0.9 * square), 10 * hidden_size)
    known = values if any_stage or stage == 3 else values[:1]
    return {
        pointer: Filled(value, f"hidden_size {hidden_size}")
        for pointer, value in zip(HIDDEN_SIZE_KEYS, known, strict=False)
    }


def _product(own: Mapping[str, Any], table: Mapping[str, Filled], ranks: int) -> dict[str, Filled]:
    """Accelerate's train_batch_size, where the file names the micro-batch."""
    steps = own.get("gradient_accumulation_steps")
    known = table.get("/gradient_accumulation_steps")
    steps = known.value if steps == "auto" and known else 1 if steps is None else steps
    micro = own.get("train_micro_batch_size_per_gpu")
    if isinstance(micro, int) and isinstance(steps, int):
        return {"/train_batch_size": Filled(micro * steps * ranks, "micro_batch x accumulation x dp")}
    return {}


def _trainer(companion: Companion, ranks: int | None) -> dict[str, Filled]:
    """axolotl has defaults of its own: what its file does not name is not known."""
    defaults = {} if companion.kind == "axolotl" else TRAINER_DEFAULTS
    table: dict[str, Filled] = {}

    def known(name: str) -> Any:
        value = getattr(companion, name)
        return defaults.get(name) if value is None else value

    def put(pointer: str, value: Any, origin: str, *names: str) -> None:
        if value is not None:
            given = not names or any(getattr(companion, name) is not None for name in names)
            table[pointer] = Filled(value, origin if given else f"{origin}'s default")

    micro, steps = known("micro_batch"), known("accumulation")
    name = "micro_batch_size" if companion.kind == "axolotl" else "per_device_train_batch_size"
    put("/train_micro_batch_size_per_gpu", micro, name, "micro_batch")
    put("/gradient_accumulation_steps", steps, "gradient_accumulation_steps", "accumulation")
    if micro is not None and steps is not None and ranks is not None:
        put("/train_batch_size", micro * steps * ranks, f"{name} x gradient_accumulation_steps x dp {ranks}")
    put("/gradient_clipping", known("gradient_clipping"), "max_grad_norm", "gradient_clipping")
    lr, betas = known("learning_rate"), [known("adam_beta1"), known("adam_beta2")]
    put(f"{PARAMS}/lr", lr, "learning_rate", "learning_rate")
    named = ("adam_beta1", "adam_beta2")
    put(f"{PARAMS}/betas", None if None in betas else betas, "adam_beta1 and adam_beta2", *named)
    put(f"{PARAMS}/eps", known("adam_epsilon"), "adam_epsilon", "adam_epsilon")
    put(f"{PARAMS}/weight_decay", known("weight_decay"), "weight_decay", "weight_decay")
    put(f"{SCHEDULE}/warmup_min_lr", 0, "the Trainer itself")
    put(f"{SCHEDULE}/warmup_max_lr", lr, "learning_rate", "learning_rate")
    put(f"{SCHEDULE}/total_num_steps", companion.max_steps, "max_steps")
    put(f"{SCHEDULE}/warmup_num_steps", *_warmup(companion))
    precision = known("precision")
    for name in ("fp16", "bf16"):
        put(f"/{name}/enabled", precision and precision == name, name, "precision")
    return table


def _warmup(companion: Companion) -> tuple[int | None, str]:
    """At least 1, as the Trainer has it. Source: training_args.py, get_warmup_steps."""
    if companion.warmup_steps:
        return companion.warmup_steps, "warmup_steps"
    if companion.warmup_ratio:
        if companion.max_steps is None:
            return None, ""
        steps = math.ceil(companion.max_steps * companion.warmup_ratio)
        return max(steps, 1), f"{companion.warmup_ratio:g} of max_steps"
    if companion.kind == "axolotl" and companion.warmup_steps is None:
        return None, ""
    return 1, "warmup_steps" if companion.warmup_steps is not None else "warmup_steps's default"


def _accelerate(companion: Companion) -> dict[str, Filled]:
    def told(value: Any, name: str, default: Any) -> Filled:
        return Filled(default if value is None else value, name if value is not None else f"{name}'s default")

    optimizer, param, gather = f"{ZERO}/offload_optimizer", f"{ZERO}/offload_param", companion.gather_16bit
    table = {
        "/gradient_clipping": told(companion.gradient_clipping, "gradient_clipping", 1.0),
        f"{ZERO}/stage": told(companion.zero_stage, "zero_stage", 2),
        f"{optimizer}/device": told(companion.optimizer_device, "offload_optimizer_device", "none"),
        f"{optimizer}/nvme_path": told(companion.optimizer_nvme_path, "offload_optimizer_nvme_path", "none"),
        f"{param}/device": told(companion.param_device, "offload_param_device", "none"),
        f"{param}/nvme_path": told(companion.param_nvme_path, "offload_param_nvme_path", "none"),
        f"{ZERO}/stage3_gather_16bit_weights_on_model_save": told(gather, "zero3_save_16bit_model", False),
    }
    if companion.accumulation is not None:
        table["/gradient_accumulation_steps"] = Filled(companion.accumulation, "gradient_accumulation_steps")
    if companion.precision is not None:
        for name in ("fp16", "bf16"):
            table[f"/{name}/enabled"] = Filled(companion.precision == name, "mixed_precision")
    return table
