"""DSP81x: the data efficiency library: curriculum learning, dynamic batching, random layerwise token dropping."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsplan.planner.rules.known_keys import title
from dsplan.planner.rules.mechanism import ERROR, WARNING, Hit, rule
from dsplan.planner.rules.reading import block, truthy, whole
from dsplan.planner.rules.structure import one_of
from dsplan.schemas.positions import Document, escape

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = "/data_efficiency"
SAMPLING, ROUTING = f"{ROOT}/data_sampling", f"{ROOT}/data_routing"
CURRICULUM, DYNAMIC, LTD = f"{SAMPLING}/curriculum_learning", f"{SAMPLING}/dynamic_batching", f"{ROUTING}/random_ltd"
METRICS = f"{CURRICULUM}/curriculum_metrics"
INNER_SWITCHES = (CURRICULUM, DYNAMIC, LTD)


@rule("DSP811", "curriculum-without-metrics", severity=ERROR, keys=[METRICS], raises="parse")
def curriculum_without_metrics(document: Document) -> Iterator[Hit]:
    """curriculum_learning needs curriculum_metrics.

    Why:    DeepSpeed asserts it at start-up.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "data_efficiency": {"data_sampling": {"curriculum_learning": {"enabled": true}}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "data_efficiency": {"data_sampling": {"curriculum_learning": {"enabled": true, "curriculum_metrics": {}}}}}
    Fix:    none
    Source: deepspeed/runtime/data_pipeline/config.py, get_curriculum_learning
    """
    if truthy(document, f"{CURRICULUM}/enabled") and "curriculum_metrics" not in block(document, CURRICULUM):
        yield Hit(CURRICULUM, "curriculum_learning is enabled without curriculum_metrics", "add them", on_key=True)


@rule("DSP812", "curriculum-metric-incomplete", severity=ERROR, keys=[METRICS])
def curriculum_metric_incomplete(document: Document) -> Iterator[Hit]:
    """A metric of curriculum_learning must hold what its schedule asks for.

    Why:    DeepSpeed asserts each of them when it builds the data loader: min_difficulty, max_difficulty, schedule_type, and
            in schedule_config total_curriculum_step and difficulty_step (fixed_linear), root_degree too (fixed_root), or
            difficulty and max_step (fixed_discrete).
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "data_efficiency": {"data_sampling": {"curriculum_learning": {"enabled": true, "curriculum_metrics": {"seqlen": {"min_difficulty": 8, "max_difficulty": 64, "schedule_type": "fixed_linear", "schedule_config": {"difficulty_step": 8}}}}}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "data_efficiency": {"data_sampling": {"curriculum_learning": {"enabled": true, "curriculum_metrics": {"seqlen": {"min_difficulty": 8, "max_difficulty": 64, "schedule_type": "fixed_linear", "schedule_config": {"difficulty_step": 8, "total_curriculum_step": 1000}}}}}}}
    Fix:    none
    Source: deepspeed/runtime/data_pipeline/curriculum_scheduler.py, CurriculumScheduler.__init__
    """
    if not truthy(document, f"{CURRICULUM}/enabled"):
        return
    for name in block(document, METRICS):
        metric = f"{METRICS}/{escape(name)}"
        yield from _missing(document, metric, ("min_difficulty", "max_difficulty", "schedule_type"))
        kind = document.at(f"{metric}/schedule_type")
        needs = _SCHEDULES.get(kind, ()) if isinstance(kind, str) else ()
        if needs and "schedule_config" not in block(document, metric):
            yield Hit(metric, f"{title(metric)} has no schedule_config", remedy="add it", on_key=True)
        elif needs:
            yield from _missing(document, f"{metric}/schedule_config", needs)
        steps = document.at(f"{metric}/schedule_config/max_step")
        difficulties = document.at(f"{metric}/schedule_config/difficulty")
        lists = kind == "fixed_discrete" and isinstance(steps, list) and isinstance(difficulties, list)
        if lists and (not steps or len(difficulties) != len(steps) + 1):
            yield Hit(
                f"{metric}/schedule_config/difficulty",
                f"difficulty has {len(difficulties)} entries and max_step {len(steps)}, but it takes one more than "
                "max_step, which is not empty",
            )


_SCHEDULES = {
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_discrete": ("difficulty", "max_step"),
}


def _missing(document: Document, pointer: str, names: tuple[str, ...]) -> Iterator[Hit]:
    missing = [name for name in names if name not in block(document, pointer)]
    if missing and isinstance(document.at(pointer), dict):
        yield Hit(
            pointer,
            f"{title(pointer)} has no {one_of(missing)}",
            remedy="add " + ("it" if len(missing) == 1 else "them"),
            on_key=True,
        )


@rule("DSP813", "dynamic-batching-without-tokens", severity=ERROR, keys=[f"{DYNAMIC}/max_tokens"], raises="parse")
def dynamic_batching_without_tokens(document: Document) -> Iterator[Hit]:
    """dynamic_batching needs max_tokens.

    Why:    DeepSpeed asserts it at start-up.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "data_efficiency": {"data_sampling": {"dynamic_batching": {"enabled": true}}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "data_efficiency": {"data_sampling": {"dynamic_batching": {"enabled": true, "max_tokens": 8192}}}}
    Fix:    none
    Source: deepspeed/runtime/data_pipeline/config.py, get_dynamic_batching
    """
    if truthy(document, f"{DYNAMIC}/enabled") and "max_tokens" not in block(document, DYNAMIC):
        yield Hit(DYNAMIC, "dynamic_batching is enabled without max_tokens", remedy="add it", on_key=True)


@rule("DSP814", "token-dropping-incomplete", severity=ERROR, keys=[LTD], raises="init")
def token_dropping_incomplete(document: Document) -> Iterator[Hit]:
    """random_ltd needs its layers and its schedule.

    Why:    DeepSpeed looks them up without a default: KeyError when the engine starts.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "data_efficiency": {"data_routing": {"random_ltd": {"enabled": true, "total_layer_num": 24, "random_ltd_layer_num": 22}}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "data_efficiency": {"data_routing": {"random_ltd": {"enabled": true, "total_layer_num": 4, "random_ltd_layer_num": 2, "random_ltd_layer_id": [1, 2], "random_ltd_schedule": {"min_value": 128, "max_value": 1024, "schedule_type": "fixed_linear", "schedule_config": {"require_steps": 1000, "seq_per_step": 16}}}}}}
    Fix:    none
    Source: deepspeed/runtime/data_pipeline/data_routing/scheduler.py, RandomLTDScheduler
    """
    if not truthy(document, f"{LTD}/enabled"):
        return
    yield from _missing(document, LTD, ("total_layer_num", "random_ltd_layer_num", "random_ltd_schedule"))
    schedule = f"{LTD}/random_ltd_schedule"
    yield from _missing(document, schedule, ("min_value", "max_value", "schedule_type", "schedule_config"))
    yield from _missing(document, f"{schedule}/schedule_config", ("require_steps", "seq_per_step"))


@rule("DSP815", "token-dropping-layers", severity=ERROR, keys=[f"{LTD}/random_ltd_layer_id"])
def token_dropping_layers(document: Document) -> Iterator[Hit]:
    """random_ltd_layer_num must be the number of entries in random_ltd_layer_id, and not above total_layer_num.

    Why:    DeepSpeed raises a ValueError when it converts the model.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "data_efficiency": {"data_routing": {"random_ltd": {"enabled": true, "total_layer_num": 4, "random_ltd_layer_num": 3, "random_ltd_layer_id": [1, 2], "random_ltd_schedule": {"min_value": 128, "max_value": 1024, "schedule_type": "fixed_linear", "schedule_config": {"require_steps": 1000, "seq_per_step": 16}}}}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "data_efficiency": {"data_routing": {"random_ltd": {"enabled": true, "total_layer_num": 4, "random_ltd_layer_num": 2, "random_ltd_layer_id": [1, 2], "random_ltd_schedule": {"min_value": 128, "max_value": 1024, "schedule_type": "fixed_linear", "schedule_config": {"require_steps": 1000, "seq_per_step": 16}}}}}}
    Fix:    none
    Source: deepspeed/runtime/engine.py, random_ltd_initialize
    """
    count, total = whole(document, f"{LTD}/random_ltd_layer_num"), whole(document, f"{LTD}/total_layer_num")
    layers = document.at(f"{LTD}/random_ltd_layer_id")
    if not truthy(document, f"{LTD}/enabled") or count is None:
        return
    if isinstance(layers, list) and len(layers) != count:
        yield Hit(
            f"{LTD}/random_ltd_layer_num",
            f"random_ltd_layer_num is {count}, but random_ltd_layer_id names {len(layers)} layers",
            remedy=f"set {len(layers)}",
        )
    elif total is not None and count > total:
        yield Hit(f"{LTD}/random_ltd_layer_num", f"random_ltd_layer_num is {count}, more than total_layer_num {total}")


@rule("DSP816", "token-dropping-rate", severity=ERROR, keys=[f"{LTD}/layer_token_lr_schedule/enabled"], raises="init")
def token_dropping_rate(document: Document) -> Iterator[Hit]:
    """random_ltd.layer_token_lr_schedule must stay off.

    Why:    It is not there yet: DeepSpeed raises NotImplementedError when the engine starts.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "data_efficiency": {"data_routing": {"random_ltd": {"enabled": true, "total_layer_num": 4, "random_ltd_layer_num": 2, "random_ltd_layer_id": [1, 2], "layer_token_lr_schedule": {"enabled": true}, "random_ltd_schedule": {"min_value": 128, "max_value": 1024, "schedule_type": "fixed_linear", "schedule_config": {"require_steps": 1000, "seq_per_step": 16}}}}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "data_efficiency": {"data_routing": {"random_ltd": {"enabled": true, "total_layer_num": 4, "random_ltd_layer_num": 2, "random_ltd_layer_id": [1, 2], "layer_token_lr_schedule": {"enabled": false}, "random_ltd_schedule": {"min_value": 128, "max_value": 1024, "schedule_type": "fixed_linear", "schedule_config": {"require_steps": 1000, "seq_per_step": 16}}}}}}
    Fix:    none
    Source: deepspeed/runtime/data_pipeline/data_routing/scheduler.py, RandomLTDScheduler
    """
    pointer = f"{LTD}/layer_token_lr_schedule/enabled"
    if truthy(document, f"{LTD}/enabled") and truthy(document, pointer):
        yield Hit(pointer, "random_ltd.layer_token_lr_schedule is not there yet in DeepSpeed", remedy="set false")


@rule("DSP817", "outer-switch-off", severity=WARNING, keys=[f"{ROOT}/enabled"])
def outer_switch_off(document: Document) -> Iterator[Hit]:
    """data_efficiency.enabled, data_sampling.enabled and data_routing.enabled switch nothing off.

    Why:    DeepSpeed reads only the innermost enabled, of curriculum_learning, dynamic_batching and random_ltd.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "data_efficiency": {"enabled": false, "data_sampling": {"dynamic_batching": {"enabled": true, "max_tokens": 8192}}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "data_efficiency": {"data_sampling": {"dynamic_batching": {"enabled": true, "max_tokens": 8192}}}}
    Fix:    none
    Source: deepspeed/runtime/data_pipeline/config.py, get_data_efficiency_config
    """
    for outer in (ROOT, SAMPLING, ROUTING):
        running = [
            inner for inner in INNER_SWITCHES if inner.startswith(f"{outer}/") and truthy(document, f"{inner}/enabled")
        ]
        if running and document.at(f"{outer}/enabled") is False:
            yield Hit(
                f"{outer}/enabled",
                f"{title(outer)}.enabled false switches nothing off: {title(running[0])} runs all the same",
                remedy=f"set {title(running[0])}.enabled to false",
            )
