"""DSP7xx, continued: the values in scheduler.params."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsplan.planner.rules.mechanism import ERROR, INFO, WARNING, Hit, rule
from dsplan.planner.rules.optimizer import optimizer_type, params
from dsplan.planner.rules.reading import number
from dsplan.planner.rules.scheduler import PARAMS, TYPE, kind_of
from dsplan.schemas.known_keys import lookup
from dsplan.schemas.positions import Document, shape

if TYPE_CHECKING:
    from collections.abc import Iterator

WARMUPS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
NEED_OBJECTS = {
    "LambdaLR": "lr_lambda is a function",
    "MultiplicativeLR": "lr_lambda is a function",
    "SequentialLR": "schedulers are objects",
    "ChainedScheduler": "schedulers are objects",
}


@rule("DSP709", "warmup-downwards", severity=WARNING, keys=[f"{PARAMS}/warmup_min_lr", f"{PARAMS}/warmup_max_lr"])
def warmup_downwards(document: Document) -> Iterator[Hit]:
    """warmup_min_lr should be below warmup_max_lr.

    Why:    The warm-up goes from the one to the other, also downwards. Where warmup_max_lr is absent the optimizer's lr
            counts (0.001 with WarmupDecayLR).
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0.01, "warmup_max_lr": 0.001}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001}}}
    Fix:    none
    Source: deepspeed/runtime/lr_schedules.py, WarmupLR
    """
    kind, values = kind_of(document), params(document, "/scheduler")
    if kind not in ("WarmupLR", "WarmupDecayLR"):
        return
    default = 0.001 if kind == "WarmupDecayLR" else params(document).get("lr", 0.001)
    low, high = number(values.get("warmup_min_lr")), number(values.get("warmup_max_lr", default))
    if low is not None and high is not None and low > high:
        of = "" if "warmup_max_lr" in values else " (the default)"
        yield Hit(
            f"{PARAMS}/warmup_min_lr", f"warmup_min_lr {low:g} is above warmup_max_lr {high:g}{of}: the warm-up falls"
        )


@rule("DSP710", "cycle-upside-down", severity=WARNING, keys=[f"{PARAMS}/cycle_min_lr", f"{PARAMS}/cycle_max_lr"])
def cycle_upside_down(document: Document) -> Iterator[Hit]:
    """cycle_min_lr should be below cycle_max_lr, and cycle_min_mom below cycle_max_mom.

    Why:    OneCycle goes from the one to the other and back, whichever is greater. The momentum is 0.8 to 0.9 by default.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.001}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.0001, "cycle_max_lr": 0.001}}}
    Fix:    none
    Source: deepspeed/runtime/lr_schedules.py, OneCycle
    """
    values = params(document, "/scheduler")
    if kind_of(document) != "OneCycle":
        return
    for least, most, defaults in (
        ("cycle_min_lr", "cycle_max_lr", (None, None)),
        ("cycle_min_mom", "cycle_max_mom", (0.8, 0.9)),
    ):
        low, high = number(values.get(least, defaults[0])), number(values.get(most, defaults[1]))
        if low is not None and high is not None and low > high:
            yield Hit(f"{PARAMS}/{least if least in values else most}", f"{least} {low:g} is above {most} {high:g}")


@rule("DSP711", "cycle-decay-idle", severity=WARNING, keys=[f"{PARAMS}/decay_step_size", f"{PARAMS}/decay_lr_rate"])
def cycle_decay_idle(document: Document) -> Iterator[Hit]:
    """The decay of OneCycle needs decay_step_size and a rate.

    Why:    With decay_step_size 0, its default, decay_lr_rate and decay_mom_rate have no effect, and without a rate (0 by
            default) nothing decays: the lr stays at cycle_min_lr after the cycle.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.0001, "cycle_max_lr": 0.001, "decay_lr_rate": 0.1}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.0001, "cycle_max_lr": 0.001, "decay_lr_rate": 0.1, "decay_step_size": 100}}}
    Fix:    none
    Source: deepspeed/runtime/lr_schedules.py, OneCycle
    """
    values = params(document, "/scheduler")
    if kind_of(document) != "OneCycle":
        return
    size = number(values.get("decay_step_size", 0))
    rates = {name: number(values.get(name, 0)) for name in ("decay_lr_rate", "decay_mom_rate")}
    given = [name for name, rate in rates.items() if rate]
    if given and size == 0:
        yield Hit(f"{PARAMS}/{given[0]}", f"{given[0]} has no effect without decay_step_size", "add decay_step_size")
    elif size and not given and None not in rates.values():
        yield Hit(
            f"{PARAMS}/decay_step_size", "decay_step_size has no effect without decay_lr_rate", "add decay_lr_rate"
        )


@rule("DSP712", "cycle-without-betas", severity=INFO, keys=[f"{PARAMS}/cycle_momentum"])
def cycle_without_betas(document: Document) -> Iterator[Hit]:
    """OneCycle moves the momentum of optimizers that have betas only.

    Why:    With another DeepSpeed warns, and only the learning rate moves. cycle_momentum is true by default.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.0001, "cycle_max_lr": 0.001}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.0001, "cycle_max_lr": 0.001, "cycle_momentum": false}}}
    Fix:    none
    Source: deepspeed/runtime/lr_schedules.py, OneCycle
    """
    optimizer = optimizer_type(document)
    takes = (lookup("/optimizer/params") or {})["x-takes"].get(optimizer, ("betas",))
    moves = params(document, "/scheduler").get("cycle_momentum", True)
    if kind_of(document) == "OneCycle" and moves is True and optimizer and "betas" not in takes:
        yield Hit(
            TYPE, f"OneCycle moves no momentum: optimizer {optimizer} has no betas", "set cycle_momentum to false"
        )


@rule("DSP713", "schedule-needs-objects", severity=ERROR, keys=[TYPE], raises="init")
def schedule_needs_objects(document: Document) -> Iterator[Hit]:
    """LambdaLR, MultiplicativeLR, SequentialLR and ChainedScheduler cannot be written in a file.

    Why:    They take functions or other schedules, which no JSON holds. The engine does not start, or fails in a step.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "scheduler": {"type": "LambdaLR", "params": {"lr_lambda": "lambda step: 1"}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "scheduler": {"type": "WarmupLR", "params": {}}}
    Fix:    none
    Source: torch/optim/lr_scheduler.py
    """
    kind = kind_of(document)
    if kind in NEED_OBJECTS:
        yield Hit(TYPE, f"scheduler {kind} cannot come from a file: its {NEED_OBJECTS[kind]}", "make it in the script")


@rule("DSP714", "one-cycle-without-length", severity=ERROR, keys=[PARAMS], raises="init")
def one_cycle_without_length(document: Document) -> Iterator[Hit]:
    """PyTorch's OneCycleLR needs total_steps, or epochs and steps_per_epoch.

    Why:    It raises a ValueError when the engine makes it.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "scheduler": {"type": "OneCycleLR", "params": {"max_lr": 0.01}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "scheduler": {"type": "OneCycleLR", "params": {"max_lr": 0.01, "total_steps": 1000}}}
    Fix:    none
    Source: torch/optim/lr_scheduler.py, OneCycleLR
    """
    values = params(document, "/scheduler")
    both = {"epochs", "steps_per_epoch"} <= values.keys()
    if kind_of(document) == "OneCycleLR" and "total_steps" not in values and not both and "max_lr" in values:
        yield Hit(PARAMS, "scheduler OneCycleLR needs total_steps", remedy="add it", on_key=True)


@rule("DSP715", "ratio-out-of-range", severity=WARNING, keys=[f"{PARAMS}/warmup_min_ratio", f"{PARAMS}/cos_min_ratio"])
def ratio_out_of_range(document: Document) -> Iterator[Hit]:
    """warmup_min_ratio and cos_min_ratio should be from 0 to 1.

    Why:    They are shares of the optimizer's lr. DeepSpeed checks neither, and an lr taken for a ratio goes unnoticed.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 5000, "cos_min_ratio": 2}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 5000, "cos_min_ratio": 0.1}}}
    Fix:    none
    Source: deepspeed/runtime/lr_schedules.py, WarmupCosineLR
    """
    for name in ("warmup_min_ratio", "cos_min_ratio"):
        ratio = number(params(document, "/scheduler").get(name))
        if kind_of(document) == "WarmupCosineLR" and ratio is not None and not 0 <= ratio <= 1:
            yield Hit(f"{PARAMS}/{name}", f"{name} is {ratio:g}, but is a share of the optimizer's lr: from 0 to 1")


@rule("DSP716", "schedule-starts-late", severity=WARNING, keys=[f"{PARAMS}/last_batch_iteration"])
def schedule_starts_late(document: Document) -> Iterator[Hit]:
    """last_batch_iteration should stay at -1, its default.

    Why:    The schedule then starts in the middle, in every new run, and the first step is made with the optimizer's own
            lr. To resume, load_checkpoint sets it.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "scheduler": {"type": "WarmupLR", "params": {"last_batch_iteration": 500}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "scheduler": {"type": "WarmupLR", "params": {"last_batch_iteration": -1}}}
    Fix:    none
    Source: deepspeed/runtime/lr_schedules.py, WarmupLR
    """
    last = params(document, "/scheduler").get("last_batch_iteration")
    if isinstance(last, int) and not isinstance(last, bool) and last != -1:
        yield Hit(
            f"{PARAMS}/last_batch_iteration",
            f"last_batch_iteration {last} starts the schedule in the middle, in every new run",
            remedy="remove it; load_checkpoint sets it",
        )


@rule("DSP717", "schedule-below-zero", severity=WARNING, keys=[PARAMS])
def schedule_below_zero(document: Document) -> Iterator[Hit]:
    """The learning rates of a schedule should not be negative.

    Why:    DeepSpeed checks none of them, and a step with a negative lr climbs.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": -0.001}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0}}}
    Fix:    none
    Source: deepspeed/runtime/lr_schedules.py
    """
    for name, value in params(document, "/scheduler").items():
        rate = number(value)
        if name.endswith("_lr") and rate is not None and rate < 0:
            yield Hit(f"{PARAMS}/{name}", f"scheduler.params.{name} is {rate:g}, but should be at least 0")


@rule("DSP718", "range-test-in-training", severity=INFO, keys=[TYPE])
def range_test_in_training(document: Document) -> Iterator[Hit]:
    """LRRangeTest is for finding a learning rate, not for training.

    Why:    The lr grows without end.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "scheduler": {"type": "LRRangeTest", "params": {}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "scheduler": {"type": "WarmupLR", "params": {}}}
    Fix:    none
    Source: deepspeed/runtime/lr_schedules.py, LRRangeTest
    """
    if kind_of(document) == "LRRangeTest":
        yield Hit(TYPE, "scheduler LRRangeTest lets the lr grow without end; it serves to find one")


@rule("DSP719", "rates-for-groups", severity=INFO, keys=[PARAMS])
def rates_for_groups(document: Document) -> Iterator[Hit]:
    """A list of learning rates must have an entry for each of the optimizer's parameter groups.

    Why:    DeepSpeed raises a ValueError where it has not. model.parameters() makes one group.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [0.001, 0.0001]}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.001}}}
    Fix:    none
    Source: deepspeed/runtime/lr_schedules.py, _format_param
    """
    for name, value in params(document, "/scheduler").items():
        if name.endswith(("_lr", "_mom")) and isinstance(value, list) and len(value) != 1:
            yield Hit(
                f"{PARAMS}/{name}",
                f"{name} {shape(value)} of {len(value)} needs as many parameter groups, which the script must make",
            )


@rule("DSP720", "scheduler-without-type", severity=ERROR, keys=[TYPE])
def scheduler_without_type(document: Document) -> Iterator[Hit]:
    """The scheduler block needs a type.

    Why:    Without it DeepSpeed ignores the whole block, and the learning rate stays as it is.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "scheduler": {"params": {"warmup_num_steps": 100}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}}}
    Fix:    none
    Source: deepspeed/runtime/config.py, get_scheduler_name
    """
    block = document.at("/scheduler")
    if isinstance(block, dict) and block and "type" not in block:
        yield Hit("/scheduler", "scheduler has no type, so DeepSpeed ignores the block", remedy="add type", on_key=True)
