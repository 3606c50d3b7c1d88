"""DSP7xx: the schedule of the learning rate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsplan.planner.rules.mechanism import ERROR, INFO, WARNING, Hit, rule
from dsplan.planner.rules.near_names import nearest
from dsplan.planner.rules.optimizer import names, params, unknown_arguments
from dsplan.planner.rules.reading import number
from dsplan.planner.rules.structure import one_of
from dsplan.schemas.known_keys import lookup
from dsplan.schemas.positions import Document, escape, shape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dsplan.schemas.config import DsConfig

TYPE, PARAMS = "/scheduler/type", "/scheduler/params"


def kind_of(document: Document) -> str | None:
    """The schedule's name where it is a known one."""
    written = document.at(TYPE)
    known = names("/scheduler")
    return written if isinstance(written, str) and written in known["deepspeed"] + known["torch"] else None


@rule("DSP701", "unknown-scheduler", severity=ERROR, keys=[TYPE], raises="init")
def unknown_scheduler(document: Document) -> Iterator[Hit]:
    """scheduler.type must be one of DeepSpeed's five or a class of torch.optim.lr_scheduler, in exact case.

    Why:    The configuration is accepted; the engine fails when it starts.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "scheduler": {"type": "cosine", "params": {}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 1000}}}
    Fix:    none
    Source: deepspeed/runtime/engine.py, _scheduler_from_config
    """
    written = document.at(TYPE)
    if not isinstance(written, str) or kind_of(document):
        return
    known = names("/scheduler")
    meant = nearest(written, known["deepspeed"] + known["torch"])
    if meant is None and len(written) >= 5:
        meant = next((name for name in known["deepspeed"] if written.lower() in name.lower()), None)
    more = f'; did you mean "{meant}"?' if meant else f"; DeepSpeed's own are {', '.join(known['deepspeed'])}"
    yield Hit(
        TYPE, f"scheduler.type {shape(written)} is neither DeepSpeed's nor a class of torch.optim.lr_scheduler{more}"
    )


@rule("DSP702", "scheduler-argument-missing", severity=ERROR, keys=[PARAMS], raises="init")
def scheduler_argument_missing(document: Document) -> Iterator[Hit]:
    """scheduler.params must be there, and hold what the schedule cannot do without.

    Why:    The configuration is accepted; Python raises a TypeError when the engine starts.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": 1000}}}
    Fix:    none
    Source: deepspeed/runtime/lr_schedules.py; deepspeed/runtime/engine.py, _scheduler_from_config
    """
    kind = kind_of(document)
    if kind is None:
        return
    if document.at(PARAMS) is None:
        yield Hit(
            "/scheduler",
            "scheduler has no params, and DeepSpeed fails without them",
            remedy='add "params": {}',
            on_key=True,
        )
        return
    missing = [
        name for name in (lookup(PARAMS) or {})["x-needs"].get(kind, ()) if name not in params(document, "/scheduler")
    ]
    if missing:
        yield Hit(
            PARAMS if document.has(PARAMS) else "/scheduler",
            f"scheduler {kind} needs {one_of(missing).replace(' or ', ' and ')}",
            remedy=f"add {missing[0]}",
            on_key=True,
        )


@rule("DSP703", "unknown-scheduler-argument", severity=ERROR, keys=[PARAMS], raises="init")
def unknown_scheduler_argument(document: Document) -> Iterator[Hit]:
    """scheduler.params must hold arguments of that schedule.

    Why:    DeepSpeed passes them on, and Python raises a TypeError when the engine starts. WarmupCosineLR for one scales the
            optimizer's lr, and takes no warmup_max_lr.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 1000, "warmup_max_lr": 0.001}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 1000}}}
    Fix:    none
    Source: deepspeed/runtime/lr_schedules.py
    """
    kind = kind_of(document)
    for name, meant, takes in unknown_arguments(document, "/scheduler", kind):
        yield Hit(
            f"{PARAMS}/{escape(name)}",
            f"scheduler {kind or 'unknown'} takes no {name}" + (f'; did you mean "{meant}"?' if meant else ""),
            remedy=f'write "{meant}"' if meant else f"it takes {one_of(takes)}" if len(takes) <= 8 else "remove it",
            on_key=True,
        )


@rule("DSP704", "schedule-over-lr", severity=WARNING, keys=[f"{PARAMS}/warmup_max_lr", "/optimizer/params/lr"])
def schedule_over_lr(document: Document) -> Iterator[Hit]:
    """The peak of a warm-up schedule overrides the optimizer's lr.

    Why:    The optimizer's lr then has no effect. WarmupDecayLR does so with 0.001 even where warmup_max_lr is absent.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01}}}
    Fix:    none
    Source: deepspeed/runtime/lr_schedules.py, WarmupLR and WarmupDecayLR
    """
    kind, lr = kind_of(document), document.at("/optimizer/params/lr")
    if kind not in ("WarmupLR", "WarmupDecayLR") or not isinstance(document.at(PARAMS), dict):
        return
    peak = document.at(f"{PARAMS}/warmup_max_lr", 0.001 if kind == "WarmupDecayLR" else None)
    if number(lr) is not None and number(peak) is not None and lr != peak:
        given = document.has(f"{PARAMS}/warmup_max_lr")
        yield Hit(
            f"{PARAMS}/warmup_max_lr" if given else "/optimizer/params/lr",
            f"the schedule's peak {peak:g}{'' if given else ' (its default)'} overrides the optimizer's lr {lr:g}",
            remedy="write the same in both" if given else "add warmup_max_lr",
        )


@rule("DSP705", "scheduler-without-optimizer", severity=INFO, keys=["/scheduler"])
def scheduler_without_optimizer(document: Document) -> Iterator[Hit]:
    """A scheduler block acts only where there is an optimizer, in the file or from the script.

    Why:    Without one DeepSpeed never looks at the block.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "scheduler": {"type": "WarmupLR", "params": {}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "scheduler": {"type": "WarmupLR", "params": {}}}
    Fix:    none
    Source: deepspeed/runtime/engine.py, _configure_lr_scheduler
    """
    if document.at(TYPE) is not None and "optimizer" not in document.value:
        yield Hit(
            "/scheduler", "scheduler is read only if the script brings an optimizer; the file has none", on_key=True
        )


@rule("DSP706", "torch-schedule-under-zero", severity=ERROR, keys=[TYPE], raises="init")
def torch_schedule_under_zero(document: Document, zero_stage: int, config: DsConfig) -> Iterator[Hit]:
    """A schedule of torch.optim.lr_scheduler goes neither with ZeRO nor with fp16 or bf16.

    Why:    It wants a torch Optimizer, which DeepSpeed's wrappers for these are not: TypeError when the engine starts.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "scheduler": {"type": "StepLR", "params": {"step_size": 10}}, "zero_optimization": {"stage": 1}}
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "scheduler": {"type": "StepLR", "params": {"step_size": 10}}, "bf16": {"enabled": true}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "scheduler": {"type": "StepLR", "params": {"step_size": 10}}}
    Fix:    none
    Source: deepspeed/runtime/engine.py, _scheduler_from_config
    """
    kind = kind_of(document)
    if kind and kind in names("/scheduler")["torch"] and (zero_stage > 0 or config.precision != "fp32"):
        where = f"at zero_stage {zero_stage}" if zero_stage > 0 else f"with {config.precision}"
        yield Hit(
            TYPE,
            f"scheduler {kind} is PyTorch's, which fails {where}",
            remedy=f"write {one_of(names('/scheduler')['deepspeed'])}",
        )


@rule("DSP707", "schedule-without-metric", severity=ERROR, keys=[TYPE])
def schedule_without_metric(document: Document) -> Iterator[Hit]:
    """ReduceLROnPlateau never changes the learning rate here.

    Why:    It needs a metric with each step, and DeepSpeed hands it none.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "scheduler": {"type": "ReduceLROnPlateau", "params": {}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "scheduler": {"type": "WarmupLR", "params": {}}}
    Fix:    none
    Source: deepspeed/runtime/engine.py, _take_model_step
    """
    if document.at(TYPE) == "ReduceLROnPlateau":
        yield Hit(
            TYPE, "scheduler ReduceLROnPlateau needs a metric, which DeepSpeed does not hand over: lr never changes"
        )


@rule("DSP708", "schedule-shorter-than-warmup", severity=WARNING, keys=[f"{PARAMS}/total_num_steps"])
def schedule_shorter_than_warmup(document: Document) -> Iterator[Hit]:
    """total_num_steps should be more than warmup_num_steps.

    Why:    Else the learning rate never reaches its peak; DeepSpeed only warns.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 100, "warmup_num_steps": 500}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 5000, "warmup_num_steps": 500}}}
    Fix:    none
    Source: deepspeed/runtime/lr_schedules.py, WarmupDecayLR
    """
    total = document.at(f"{PARAMS}/total_num_steps")
    warmup = document.at(f"{PARAMS}/warmup_num_steps", 1000)
    if type(total) is int and type(warmup) is int and total < max(warmup, 1):
        default = "" if document.has(f"{PARAMS}/warmup_num_steps") else " (its default)"
        yield Hit(
            f"{PARAMS}/total_num_steps",
            f"total_num_steps is {total}, less than warmup_num_steps {warmup}{default}: the schedule ends before its peak",
        )
