"""DSP020-DSP039: the configuration beside the arguments of the HF Trainer or Accelerate."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from dsplan.planner.rules.known_keys import members, title
from dsplan.planner.rules.mechanism import ERROR, WARNING, Hit, replaced, rule
from dsplan.planner.rules.precision import on

if TYPE_CHECKING:
    from dsplan.planner.auditing.filling import Filled
    from dsplan.schemas.cluster import Cluster
    from dsplan.schemas.companion import Companion
    from dsplan.schemas.positions import Document

Table = Mapping[str, "Filled"]
ZERO, PARAMS, SCHEDULE = "/zero_optimization", "/optimizer/params", "/scheduler/params"
MICRO, STEPS = "/train_micro_batch_size_per_gpu", "/gradient_accumulation_steps"


@rule("DSP020", "unlike-training-arguments", severity=ERROR, keys=[MICRO, STEPS], raises="init")
def unlike_training_arguments(document: Document, companion: Companion, filled: Table) -> Iterator[Hit]:
    """Micro-batch and accumulation must equal the training arguments, or be "auto".

    Why:    The Trainer compares what it fills, its defaults included, and raises a ValueError with all that differ.
    Given:  reader trainer, args.micro_batch 4
    Bad:    {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 2, "gradient_clipping": "auto"}
    Good:   {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto"}
    Fix:    unsafe
    Source: transformers/integrations/deepspeed.py, fill_match
    """
    pointers = [STEPS] if companion.finds_batch else [MICRO, STEPS]
    yield from _unlike_trainer(document, companion, filled, *pointers)


@rule("DSP021", "global-batch-unlike-arguments", severity=ERROR, keys=["/train_batch_size"], raises="init")
def global_batch_unlike_arguments(
    document: Document, companion: Companion, filled: Table, cluster: Cluster
) -> Iterator[Hit]:
    """train_batch_size must equal per_device_train_batch_size x gradient_accumulation_steps x GPUs, or be "auto".

    Why:    The Trainer computes it from its arguments and raises a ValueError where the file has another one.
    Given:  reader trainer, dp 4, args.micro_batch 1
    Bad:    {"train_batch_size": 32, "gradient_clipping": "auto"}
    Good:   {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto"}
    Good:   {"train_batch_size": 4, "gradient_clipping": "auto"}
    Fix:    unsafe
    Source: transformers/integrations/deepspeed.py, trainer_config_process
    """
    if not companion.finds_batch:
        yield from _unlike_trainer(document, companion, filled, "/train_batch_size")


@rule("DSP022", "precision-unlike-arguments", severity=ERROR, keys=["/fp16/enabled", "/bf16/enabled"], raises="init")
def precision_unlike_arguments(document: Document, companion: Companion, filled: Table) -> Iterator[Hit]:
    """fp16.enabled and bf16.enabled must equal the arguments fp16 and bf16, or be "auto".

    Why:    The Trainer raises a ValueError where they differ. Both arguments are false where nothing names them.
    Given:  reader trainer, args.precision bf16
    Bad:    {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto", "bf16": {"enabled": false}}
    Good:   {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto", "bf16": {"enabled": "auto"}}
    Fix:    unsafe
    Source: transformers/integrations/deepspeed.py, trainer_config_process
    """
    yield from _unlike_trainer(document, companion, filled, "/fp16/enabled", "/bf16/enabled")


@rule("DSP023", "clipping-unlike-arguments", severity=ERROR, keys=["/gradient_clipping"], raises="init")
def clipping_unlike_arguments(document: Document, companion: Companion, filled: Table) -> Iterator[Hit]:
    """gradient_clipping must equal max_grad_norm, or be "auto".

    Why:    The Trainer raises a ValueError where they differ; max_grad_norm is 1.0 where nothing names it.
    Given:  reader trainer, args.gradient_clipping 0.5
    Bad:    {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": 1.0}
    Good:   {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": 0.5}
    Fix:    unsafe
    Source: transformers/integrations/deepspeed.py, trainer_config_process
    """
    yield from _unlike_trainer(document, companion, filled, "/gradient_clipping")


@rule(
    "DSP024",
    "optimizer-unlike-arguments",
    severity=ERROR,
    keys=[f"{PARAMS}/{name}" for name in ("lr", "betas", "eps", "weight_decay")],
    raises="init",
)
def optimizer_unlike_arguments(document: Document, companion: Companion, filled: Table) -> Iterator[Hit]:
    """lr, betas, eps and weight_decay of the optimizer must equal the training arguments, or be "auto".

    Why:    The Trainer raises a ValueError where they differ, also from its defaults (learning_rate 5e-5, weight_decay 0).
    Given:  reader trainer, args.learning_rate 5e-5
    Bad:    {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto",
             "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}}
    Good:   {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto",
             "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    Fix:    unsafe
    Source: transformers/integrations/deepspeed.py, trainer_config_process
    """
    names = ("lr", "betas", "eps", "weight_decay")
    yield from _unlike_trainer(document, companion, filled, *(f"{PARAMS}/{name}" for name in names))


@rule(
    "DSP025",
    "schedule-unlike-arguments",
    severity=ERROR,
    keys=[f"{SCHEDULE}/{name}" for name in ("warmup_max_lr", "warmup_num_steps", "total_num_steps")],
    raises="init",
)
def schedule_unlike_arguments(document: Document, companion: Companion, filled: Table) -> Iterator[Hit]:
    """Peak, warm-up and length of the schedule must equal the training arguments, or be "auto".

    Why:    The Trainer raises a ValueError where they differ: learning_rate, warmup_steps (at least 1; or warmup_ratio of all
            steps), and the number of steps. The last two are compared where max_steps is known.
    Given:  reader trainer, args.warmup_steps 100
    Bad:    {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto",
             "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
             "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": 500}}}
    Good:   {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto",
             "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
             "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}}}
    Fix:    unsafe
    Source: transformers/integrations/deepspeed.py, trainer_config_finalize; transformers/training_args.py, get_warmup_steps
    """
    names = ("warmup_max_lr", "warmup_num_steps", "total_num_steps")
    yield from _unlike_trainer(document, companion, filled, *(f"{SCHEDULE}/{name}" for name in names))


def _unlike_trainer(document: Document, companion: Companion, filled: Table, *pointers: str) -> Iterator[Hit]:
    if companion.kind != "accelerate":
        for pointer in _differing(document, filled, pointers):
            said = _unlike(document, pointer, filled[pointer], companion)
            fix = replaced(document.values_at[pointer], '"auto"', safe=False)
            yield Hit(pointer, f"{said}; the Trainer refuses the file", remedy='write "auto"', fix=fix)


def _differing(document: Document, filled: Table, pointers: tuple[str, ...]) -> Iterator[str]:
    """Those that the file names otherwise. Compared as the readers do, so that a text is no number."""
    for pointer in pointers:
        written = document.at(pointer)
        if pointer not in filled or pointer not in document.values_at or written is None or written == "auto":
            continue
        if written != filled[pointer].value:
            yield pointer


def _unlike(document: Document, pointer: str, told: Filled, companion: Companion) -> str:
    written = " ".join(document.raw(pointer).split())
    where = "" if told.origin.endswith(" default") else f" in {companion.source}"
    return f"{title(pointer)} is {written}, but {told.origin} is {json.dumps(told.value)}{where}"


@rule("DSP026", "fields-beside-config-file", severity=ERROR, keys=[], raises="init")
def fields_beside_config_file(document: Document, companion: Companion) -> Iterator[Hit]:
    """An Accelerate file that names a deepspeed_config_file must not name the same things itself.

    Why:    Accelerate raises a ValueError where zero_stage, the offload fields, gradient_clipping,
            gradient_accumulation_steps, zero3_save_16bit_model or mixed_precision stand beside deepspeed_config_file.
    Given:  reader accelerate, args.kind accelerate, args.config_file ds.json, args.beside_config_file zero_stage
    Bad:    {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2}}
    Given:  Good with reader accelerate, args.kind accelerate, args.config_file ds.json
    Good:   {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "zero_optimization": {"stage": 1}}
    Fix:    none
    Source: accelerate/utils/dataclasses.py, _deepspeed_config_checks
    """
    names = companion.beside_config_file
    if names:
        yield Hit(
            "",
            f"{companion.source} has {', '.join(names)} beside deepspeed_config_file; Accelerate refuses that",
            remedy=f"remove {'it' if len(names) == 1 else 'them'} there, and write the values here",
        )


@rule("DSP027", "unlike-accelerate", severity=WARNING, keys=[f"{ZERO}/stage", "/gradient_clipping", STEPS])
def unlike_accelerate(document: Document, companion: Companion, filled: Table) -> Iterator[Hit]:
    """Stage, offload, clipping and accumulation should not differ from the Accelerate file.

    Why:    Accelerate fills "auto" alone: where the two differ, this file counts, and what the other one says has no effect.
    Given:  reader accelerate, args.kind accelerate, args.zero_stage 3
    Bad:    {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2}}
    Good:   {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "zero_optimization": {"stage": "auto"}}
    Fix:    none
    Source: accelerate/utils/dataclasses.py, DeepSpeedPlugin.__post_init__ (must_match=False)
    """
    if companion.kind != "accelerate" or companion.beside_config_file:
        return
    pointers = {
        f"{ZERO}/stage": companion.zero_stage,
        f"{ZERO}/offload_optimizer/device": companion.optimizer_device,
        f"{ZERO}/offload_param/device": companion.param_device,
        "/gradient_clipping": companion.gradient_clipping,
        STEPS: companion.accumulation,
    }
    given = tuple(pointer for pointer, value in pointers.items() if value is not None)
    for pointer in _differing(document, filled, given):
        said = _unlike(document, pointer, filled[pointer], companion)
        yield Hit(pointer, f"{said}; this file counts", remedy="give both the same value")
    for block in ("offload_optimizer", "offload_param"):
        device = pointers[f"{ZERO}/{block}/device"]
        if device in ("cpu", "nvme") and document.at(f"{ZERO}/{block}") is None:
            yield Hit(
                ZERO if document.has(ZERO) else "",
                f"{block} is not there, but {block}_device is {device} in {companion.source}; this file counts, and nothing is offloaded",
                remedy=f'add "{block}": {{"device": "{device}"}}',
            )


@rule("DSP028", "mixed-precision-conflict", severity=ERROR, keys=["/fp16/enabled", "/bf16/enabled"], raises="init")
def mixed_precision_conflict(document: Document, companion: Companion) -> Iterator[Hit]:
    """Accelerate's mixed_precision must not name another precision than the one that the file switches on.

    Why:    Accelerate raises a ValueError.
    Given:  reader accelerate, args.kind accelerate, args.mixed_precision bf16
    Bad:    {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2}, "fp16": {"enabled": true}}
    Good:   {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}
    Fix:    none
    Source: accelerate/utils/dataclasses.py, set_mixed_precision
    """
    mixed = companion.mixed_precision
    if mixed in ("fp16", "bf16", "fp8") and not companion.beside_config_file:
        other = "bf16" if mixed == "fp16" else "fp16"
        if on(document, f"/{other}/enabled"):
            yield Hit(
                f"/{other}/enabled",
                f"{other} is on, but mixed_precision in {companion.source} is {mixed}; Accelerate refuses that",
                remedy="name one precision in both",
            )


@rule("DSP029", "mixed-precision-without-effect", severity=WARNING, keys=["/fp16/enabled", "/bf16/enabled"])
def mixed_precision_without_effect(document: Document, companion: Companion) -> Iterator[Hit]:
    """Accelerate's mixed_precision should say what the file says.

    Why:    Where the file has the block and it is no "auto", the file counts: mixed_precision bf16 beside a bf16 that is off
            trains in fp32, and mixed_precision no beside an fp16 that is on trains in fp16.
    Given:  reader accelerate, args.kind accelerate, args.mixed_precision bf16
    Bad:    {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2}, "bf16": {"enabled": false}}
    Good:   {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}}
    Fix:    none
    Source: accelerate/utils/dataclasses.py, set_mixed_precision
    """
    mixed = companion.mixed_precision
    if mixed is None or companion.beside_config_file:
        return
    wanted = {"fp16": "fp16", "bf16": "bf16", "fp8": "bf16"}.get(mixed)
    for name in ("fp16", "bf16"):
        pointer = f"/{name}/enabled"
        written = document.at(pointer)
        if written in (None, "auto"):
            continue
        is_on = on(document, pointer)
        if (name == wanted and not is_on) or (wanted is None and is_on):
            yield Hit(
                pointer,
                f"{name} is {'on' if is_on else 'off'}, but mixed_precision in {companion.source} is {mixed}; this file counts",
                remedy="say the same in both",
            )


@rule("DSP030", "auto-accelerate-cannot-fill", severity=ERROR, keys=[f"{PARAMS}/betas", f"{PARAMS}/eps"], raises="init")
def auto_accelerate_cannot_fill(document: Document, companion: Companion) -> Iterator[Hit]:
    """Under Accelerate without the Trainer, betas and eps must not be "auto".

    Why:    Only the Trainer fills them. Accelerate looks for a value for every "auto" and raises a ValueError that names the key.
    Given:  reader accelerate, args.kind accelerate, args.zero_stage 2
    Bad:    {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2},
             "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}}}
    Good:   {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2},
             "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.95]}}}
    Fix:    none
    Source: accelerate/utils/dataclasses.py, fill_match; accelerate/accelerator.py, _prepare_deepspeed
    """
    if companion.kind == "accelerate":
        from dsplan.planner.auditing.filling import ACCELERATE_FILLS

        for member in members(document):
            filler = (member.node or {}).get("x-auto")
            if member.value == "auto" and filler and member.pointer not in ACCELERATE_FILLS:
                yield Hit(
                    member.pointer,
                    f'{title(member.pointer)} is "auto", which the Trainer fills and Accelerate by itself does not; it refuses the file',
                    remedy="write a value",
                )


@rule("DSP032", "optim-without-effect", severity=WARNING, keys=["/optimizer/type"])
def optim_without_effect(document: Document, companion: Companion) -> Iterator[Hit]:
    """The training arguments should name the optimizer of the file, or the file none.

    Why:    Where the file has an optimizer, DeepSpeed builds that one and the Trainer makes none: optim (optimizer in
            axolotl) has no effect.
    Given:  reader trainer, args.optim adamw_bnb_8bit
    Bad:    {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto", "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    Good:   {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto"}
    Fix:    none
    Source: transformers/integrations/deepspeed.py, deepspeed_optim_sched
    """
    kind, told = document.at("/optimizer/type"), companion.optim
    if companion.kind == "accelerate" or not isinstance(kind, str) or told is None:
        return
    same = kind.lower() in (companion.optimizer, f"{companion.optimizer}w")
    if kind.lower() == "adam" and companion.optimizer == "adamw":  # Adam is AdamW unless adam_w_mode is false
        same = True
    if not same:
        name = "optimizer" if companion.kind == "axolotl" else "optim"
        yield Hit(
            "/optimizer/type",
            f"optimizer.type is {kind}, but {name} is {told}; this file counts",
            remedy=f"remove the block to train with {told}",
        )


_SCHEDULES = {
    "WarmupLR": "constant_with_warmup",
    "WarmupDecayLR": "linear",
    "WarmupCosineLR": "cosine",
}


@rule("DSP033", "lr-scheduler-without-effect", severity=WARNING, keys=["/scheduler/type"])
def lr_scheduler_without_effect(document: Document, companion: Companion) -> Iterator[Hit]:
    """The training arguments should name the schedule of the file, or the file none.

    Why:    Where the file has a scheduler, DeepSpeed builds that one, and lr_scheduler_type has no effect: cosine beside
            WarmupDecayLR trains with a linear decay. WarmupLR is constant_with_warmup, WarmupDecayLR linear, WarmupCosineLR cosine.
    Given:  reader trainer, args.lr_scheduler cosine
    Bad:    {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto",
             "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
             "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}}}
    Good:   {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto", "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    Fix:    none
    Source: transformers/integrations/deepspeed.py, deepspeed_optim_sched
    """
    kind, told = document.at("/scheduler/type"), companion.lr_scheduler
    if companion.kind != "accelerate" and isinstance(kind, str) and told is not None and _SCHEDULES.get(kind) != told:
        name = "lr_scheduler" if companion.kind == "axolotl" else "lr_scheduler_type"
        yield Hit(
            "/scheduler/type",
            f"scheduler.type is {kind}, but {name} is {told}; this file counts",
            remedy=f"remove the block to train with {told}",
        )


@rule("DSP034", "processes-unlike-cluster", severity=WARNING, keys=[])
def processes_unlike_cluster(document: Document, companion: Companion, cluster: Cluster) -> Iterator[Hit]:
    """Accelerate's num_processes should be the number of GPUs that the check is for.

    Why:    num_processes counts over all machines, and decides the global batch.
    Given:  reader accelerate, args.kind accelerate, args.processes 4, dp 8
    Bad:    {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2}}
    Given:  Good with reader accelerate, args.kind accelerate, args.processes 8, dp 8
    Good:   {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2}}
    Fix:    none
    Source: accelerate/utils/launch.py, prepare_multi_gpu_env
    """
    if companion.processes is not None and companion.processes != cluster.ranks:
        yield Hit(
            "",
            f"num_processes in {companion.source} is {companion.processes}, but the cluster has {cluster.ranks} GPUs",
            remedy=f"check with --cluster {companion.processes}, or set num_processes to {cluster.ranks}",
        )
