"""DSP32x: ZenFlow, which updates important gradients on the GPU and the rest on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dsplan.planner.rules.mechanism import ERROR, WARNING, Hit, rule
from dsplan.planner.rules.precision import on

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dsplan.schemas.positions import Document

BLOCK = "/zero_optimization/zenflow"
OFFLOAD = "/zero_optimization/offload_optimizer"


def _block(document: Document) -> dict[str, Any] | None:
    """The block where it is there; {} switches ZenFlow on too."""
    block = document.at(BLOCK)
    return block if isinstance(block, dict) else None


def _interval(block: dict[str, Any], name: str) -> int | None:
    value = block.get(name)
    return int(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


@rule("DSP320", "zenflow-without-offload", severity=ERROR, keys=[BLOCK], raises="init")
def zenflow_without_offload(document: Document, zero_stage: int) -> Iterator[Hit]:
    """ZenFlow needs an offloaded optimizer at zero_stage 1 and 2.

    Why:    At zero_stage 1 and 2 the engine refuses it when it starts.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}, "offload_optimizer": {"device": "cpu"}}}
    Fix:    none
    Source: deepspeed/runtime/zenflow/zenflow_stage_1_and_2.py, ZenFlowZeroOptimizer.__init__
    """
    if _block(document) is None or zero_stage not in (1, 2) or on(document, "/zero_optimization/cpu_offload"):
        return
    if document.at(f"{OFFLOAD}/device") not in ("cpu", "nvme", "auto"):
        yield Hit(
            BLOCK,
            "zenflow is on, but the optimizer is not offloaded",
            remedy='add "offload_optimizer": {"device": "cpu"}',
            on_key=True,
        )


@rule("DSP321", "zenflow-at-stage-0", severity=ERROR, keys=[BLOCK], raises="step")
def zenflow_at_stage_0(document: Document, zero_stage: int) -> Iterator[Hit]:
    """ZenFlow needs zero_stage 1 or more.

    Why:    The engine starts, and its first step fails with an AttributeError: there is no ZeRO optimizer to ask.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 0, "zenflow": {"topk_ratio": 0.1}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}, "offload_optimizer": {"device": "cpu"}}}
    Fix:    none
    Source: deepspeed/runtime/zenflow/engine.py, is_zenflow_update_boundary
    """
    if _block(document) is not None and zero_stage == 0:
        yield Hit(
            BLOCK,
            "zenflow is on at zero_stage 0, and the first step fails",
            remedy="set zero_optimization.stage to 1 or more, or remove it",
            on_key=True,
        )


@rule("DSP322", "zenflow-intervals", severity=ERROR, keys=[f"{BLOCK}/select_interval"], raises="init")
def zenflow_intervals(document: Document) -> Iterator[Hit]:
    """zenflow.select_interval must go with select_strategy, and be no less than update_interval.

    Why:    The engine raises when it starts: with strategy auto select_interval must be "auto", with step and epoch it must
            be a number, and with step no less than update_interval.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "zenflow": {"select_strategy": "step"}}}
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "zenflow": {"select_interval": 4}}}
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "zenflow": {"select_strategy": "step", "select_interval": 2, "update_interval": 4}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "zenflow": {"select_strategy": "step", "select_interval": 4, "update_interval": 4}}}
    Fix:    none
    Source: deepspeed/runtime/zenflow/engine.py, configure_zenflow
    """
    block = _block(document)
    if block is None:
        return
    strategy = block.get("select_strategy", "auto")
    select, update = _interval(block, "select_interval"), _interval(block, "update_interval")
    at = f"{BLOCK}/select_interval"
    if strategy == "auto" and select is not None:
        yield Hit(at, f'zenflow.select_interval is {select}, but must be "auto" with strategy auto', remedy="remove it")
    elif strategy in ("step", "epoch") and select is None and block.get("select_interval", "auto") == "auto":
        yield Hit(at, f"zenflow.select_interval must be a number with strategy {strategy}", remedy="set a number")
    elif strategy == "step" and select is not None and update is not None and select < update:
        yield Hit(
            at,
            f"zenflow.select_interval is {select}, less than update_interval {update}",
            remedy=f"set {update} or more",
        )


@rule("DSP323", "zenflow-offload-without-overlap", severity=ERROR, keys=[f"{BLOCK}/offload"], raises="init")
def zenflow_offload_without_overlap(document: Document, zero_stage: int) -> Iterator[Hit]:
    """zenflow.offload needs overlap_comm.

    Why:    The engine asserts it when it starts. overlap_comm is off by itself at zero_stage 1 and 2.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "zenflow": {"offload": true}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2, "overlap_comm": true, "offload_optimizer": {"device": "cpu"}, "zenflow": {"offload": true}}}
    Fix:    none
    Source: deepspeed/runtime/zenflow/zenflow_stage_1_and_2.py; deepspeed/runtime/zenflow/engine_stage3.py
    """
    overlap = document.at("/zero_optimization/overlap_comm")
    by_itself = overlap in (None, "auto") and zero_stage == 3
    overlaps = by_itself or on(document, "/zero_optimization/overlap_comm")
    if on(document, f"{BLOCK}/offload") and zero_stage > 0 and not overlaps:
        yield Hit(
            f"{BLOCK}/offload", "zenflow.offload is on, but overlap_comm is off", remedy="set overlap_comm to true"
        )


@rule("DSP324", "zenflow-replaces-accumulation", severity=WARNING, keys=["/gradient_accumulation_steps"])
def zenflow_replaces_accumulation(document: Document, zero_stage: int) -> Iterator[Hit]:
    """With ZenFlow the engine takes update_interval in the place of gradient_accumulation_steps.

    Why:    It does so after the batch sizes were checked, so that train_batch_size is no longer what a step trains.
    Bad:    {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "zenflow": {"update_interval": 4}}}
    Good:   {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "zenflow": {"update_interval": 4}}}
    Fix:    none
    Source: deepspeed/runtime/zenflow/engine.py, configure_zenflow
    """
    block, steps = _block(document), document.at("/gradient_accumulation_steps")
    if block is None or zero_stage == 0 or isinstance(steps, bool) or not isinstance(steps, int) or steps < 2:
        return
    update = _interval(block, "update_interval")
    if update != steps:
        taken = "what update_interval auto makes of it" if update is None else f"update_interval {update}"
        yield Hit(
            "/gradient_accumulation_steps",
            f"gradient_accumulation_steps is {steps}, but zenflow takes {taken} instead",
            remedy="set both alike",
        )


@rule("DSP325", "zenflow-by-empty-block", severity=WARNING, keys=[BLOCK])
def zenflow_by_empty_block(document: Document) -> Iterator[Hit]:
    """An empty zenflow block switches ZenFlow on.

    Why:    DeepSpeed asks whether the block is there, not what is in it.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "zenflow": {}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    Fix:    none
    Source: deepspeed/runtime/zenflow/engine.py, configure_zenflow
    """
    if _block(document) == {}:
        yield Hit(
            BLOCK, "zenflow is {}, which switches ZenFlow on", remedy="remove it, or write topk_ratio", on_key=True
        )
