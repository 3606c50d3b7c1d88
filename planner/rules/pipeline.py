"""DSP50x: pipelines. The number of stages is PipelineModule's affair; a file tells it in its dsplan block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsplan.planner.rules.mechanism import ERROR, WARNING, Hit, rule
from dsplan.planner.rules.precision import on
from dsplan.planner.rules.reading import whole

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dsplan.schemas.cluster import Cluster
    from dsplan.schemas.config import DsConfig
    from dsplan.schemas.positions import Document

STAGES, SECTION = "/dsplan/pipeline_stages", "/pipeline"
BUBBLE_LIMIT = 0.2
"""With 4 micro-batches per stage the bubble stays below. Source: Huang et al. 2019 (arXiv:1811.06965), section 2.3."""


def pipeline_stages(document: Document) -> tuple[str, int] | None:
    """Where the file says how many stages there are, and how many; None where it does not, or says one."""
    for pointer in (STAGES, f"{SECTION}/stages"):
        stages = whole(document, pointer)
        if stages is not None and stages > 1:
            return pointer, stages
    return None


@rule("DSP501", "pipeline-bubble", severity=WARNING, keys=[STAGES, "/gradient_accumulation_steps"])
def pipeline_bubble(document: Document, config: DsConfig) -> Iterator[Hit]:
    """gradient_accumulation_steps should be several times the number of pipeline stages.

    Why:    Accumulation is the number of micro-batches in flight. Of each step, (stages - 1) / (accumulation + stages - 1)
            passes idle while the pipeline fills and drains.
    Bad:    {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0, "dsplan": {"pipeline_stages": 4}}
    Good:   {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 32, "gradient_clipping": 1.0, "dsplan": {"pipeline_stages": 4}}
    Fix:    none
    Source: deepspeed/runtime/pipe/schedule.py, TrainSchedule; Huang et al. 2019 (arXiv:1811.06965)
    """
    told = pipeline_stages(document)
    steps = config.accumulation
    if steps is None and (config.train_batch_size is None or config.micro_batch is None):
        steps = 1
    if told is None or not isinstance(steps, int):
        return
    pointer, stages = told
    bubble, wanted = _bubble(stages, steps), 8 * stages
    if bubble > BUBBLE_LIMIT:
        has = document.has("/gradient_accumulation_steps")
        yield Hit(
            "/gradient_accumulation_steps" if has else pointer,
            f"gradient_accumulation_steps {steps} with {stages} pipeline stages leaves a bubble of "
            f"({stages} - 1) / ({steps} + {stages} - 1) = {bubble:.0%}",
            remedy=f"set {wanted} or more (8 x stages: {_bubble(stages, wanted):.1%})",
        )


def _bubble(stages: int, steps: int) -> float:
    return (stages - 1) / (steps + stages - 1)


@rule("DSP502", "zero-beyond-pipeline", severity=ERROR, keys=["/zero_optimization/stage", STAGES], raises="init")
def zero_beyond_pipeline(document: Document, zero_stage: int) -> Iterator[Hit]:
    """A pipeline goes with zero_stage 0 and 1 only.

    Why:    DeepSpeed asserts it when the engine of a PipelineModule starts. Error where the file tells a number of stages;
            warning where it only has a pipeline block, which a model without a pipeline does not read.
    Bad:    {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 32, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2}, "dsplan": {"pipeline_stages": 4}}
    Good:   {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 32, "gradient_clipping": 1.0, "zero_optimization": {"stage": 1}, "dsplan": {"pipeline_stages": 4}}
    Fix:    none
    Source: deepspeed/runtime/pipe/engine.py, PipelineEngine.__init__
    """
    if zero_stage < 2:
        return
    said = f"zero_optimization.stage is {zero_stage}, but a pipeline takes 0 or 1"
    stages = whole(document, STAGES)
    if stages is not None and stages > 1:
        yield Hit(
            "/zero_optimization/stage",
            f"{said}, and there are {stages} pipeline stages",
            remedy="set 1, or no pipeline",
        )
    elif isinstance(document.at(SECTION), dict) and document.at(SECTION):
        yield Hit(
            SECTION,
            f"{said}: with a PipelineModule DeepSpeed refuses it, with any other model the block has no effect",
            remedy="set stage 1, or remove the block",
            on_key=True,
            severity=WARNING,
        )


@rule("DSP503", "overlap-in-pipeline", severity=WARNING, keys=["/zero_optimization/overlap_comm", STAGES])
def overlap_in_pipeline(document: Document, zero_stage: int) -> Iterator[Hit]:
    """overlap_comm has no effect at zero_stage 1 with a pipeline.

    Why:    DeepSpeed switches it off, and says so in its log.
    Bad:    {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 32, "gradient_clipping": 1.0, "zero_optimization": {"stage": 1, "overlap_comm": true}, "dsplan": {"pipeline_stages": 4}}
    Good:   {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 32, "gradient_clipping": 1.0, "zero_optimization": {"stage": 1}, "dsplan": {"pipeline_stages": 4}}
    Fix:    none
    Source: deepspeed/runtime/engine.py, _configure_zero_optimizer
    """
    pointer = "/zero_optimization/overlap_comm"
    if zero_stage == 1 and pipeline_stages(document) and on(document, pointer):
        yield Hit(pointer, "overlap_comm has no effect in a pipeline: DeepSpeed switches it off", remedy="set false")


@rule("DSP504", "unmanaged-pipeline", severity=ERROR, keys=["/managed_gradient_accumulation", STAGES], raises="init")
def unmanaged_pipeline(document: Document) -> Iterator[Hit]:
    """managed_gradient_accumulation false does not go with a pipeline.

    Why:    A pipeline counts its micro-batches itself; DeepSpeed asserts it when the engine starts.
    Bad:    {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 32, "gradient_clipping": 1.0, "managed_gradient_accumulation": false, "dsplan": {"pipeline_stages": 4}}
    Good:   {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 32, "gradient_clipping": 1.0, "dsplan": {"pipeline_stages": 4}}
    Fix:    none
    Source: deepspeed/runtime/engine.py, DeepSpeedEngine.__init__
    """
    pointer, told = "/managed_gradient_accumulation", pipeline_stages(document)
    if told and document.at(pointer) is False:
        yield Hit(
            pointer, f"managed_gradient_accumulation is false, which a pipeline refuses ({told[1]} stages)", "set true"
        )


@rule("DSP505", "pipeline-uneven", severity=ERROR, keys=[STAGES])
def pipeline_uneven(document: Document, cluster: Cluster) -> Iterator[Hit]:
    """The number of pipeline stages must divide the number of GPUs.

    Why:    PipelineModule raises a RuntimeError.
    Given:  dp 8
    Bad:    {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 32, "gradient_clipping": 1.0, "dsplan": {"pipeline_stages": 3}}
    Good:   {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 32, "gradient_clipping": 1.0, "dsplan": {"pipeline_stages": 4}}
    Fix:    none
    Source: deepspeed/runtime/pipe/module.py, PipelineModule.__init__
    """
    stages = whole(document, STAGES)
    if stages is not None and stages > 1 and cluster.ranks % stages:
        yield Hit(STAGES, f"dsplan.pipeline_stages is {stages}, which does not divide {gpus(cluster)}")


@rule("DSP506", "hybrid-engine-in-pipeline", severity=WARNING, keys=["/hybrid_engine/enabled", STAGES])
def hybrid_engine_in_pipeline(document: Document) -> Iterator[Hit]:
    """hybrid_engine has no effect with a pipeline.

    Why:    A PipelineModule always gets the pipeline's engine.
    Bad:    {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 32, "gradient_clipping": 1.0, "hybrid_engine": {"enabled": true}, "dsplan": {"pipeline_stages": 4}}
    Good:   {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 32, "gradient_clipping": 1.0, "hybrid_engine": {"enabled": true}}
    Fix:    none
    Source: deepspeed/__init__.py, initialize
    """
    if pipeline_stages(document) and on(document, "/hybrid_engine/enabled"):
        yield Hit("/hybrid_engine/enabled", "hybrid_engine has no effect with a pipeline", remedy="set false")


def gpus(cluster: Cluster) -> str:
    return f"{cluster.ranks} GPU{'s' if cluster.ranks > 1 else ''}"
