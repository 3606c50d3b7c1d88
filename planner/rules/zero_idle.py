"""DSP309 to DSP316: keys of ZeRO and of gradient reduction that are not read, or that fail, beside others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsplan.planner.rules.mechanism import ERROR, INFO, WARNING, Hit, rule
from dsplan.planner.rules.precision import number_at, on

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dsplan.schemas.positions import Document

ZERO = "/zero_optimization"
PREDIVIDE = "/gradient_predivide_factor"


def scatters(document: Document) -> bool:
    """reduce_scatter as DeepSpeed takes it: true where it is absent or "auto"."""
    value = document.at(f"{ZERO}/reduce_scatter", True)
    return value in (True, "auto") or on(document, f"{ZERO}/reduce_scatter")


def averages(document: Document) -> bool:
    operation = document.at("/gradient_allreduce_op", "mean")
    return not (isinstance(operation, str) and operation.lower() == "sum")


@rule("DSP309", "division-by-zero", severity=ERROR, keys=[PREDIVIDE], raises="step")
def division_by_zero(document: Document, zero_stage: int) -> Iterator[Hit]:
    """gradient_predivide_factor must not be 0.

    Why:    Gradients are divided by it. The first step raises a ZeroDivisionError (at zero_stage 3 all becomes inf or nan).
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "gradient_predivide_factor": 0}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "gradient_predivide_factor": 1.0}
    Fix:    none
    Source: deepspeed/runtime/engine.py, allreduce_bucket; deepspeed/runtime/zero/stage_1_and_2.py, gradient_reduction_w_predivide
    """
    read = zero_stage == 0 or not scatters(document)
    if (
        number_at(document, PREDIVIDE, 1.0) == 0
        and read
        and averages(document)
        and not document.at("/prescale_gradients")
    ):
        yield Hit(
            PREDIVIDE,
            "gradient_predivide_factor is 0, and gradients are divided by it",
            remedy="set 1.0, or remove it",
            raises="step" if zero_stage < 3 else "never",
        )


@rule("DSP310", "division-not-read", severity=WARNING, keys=[PREDIVIDE, "/prescale_gradients"])
def division_not_read(document: Document, zero_stage: int) -> Iterator[Hit]:
    """gradient_predivide_factor and prescale_gradients are not read at stage 1 with reduce_scatter, nor for a sum.

    Why:    There gradients are divided by the number of ranks before they are reduced, and by nothing else. A sum is not
            divided at all.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "gradient_predivide_factor": 2.0, "zero_optimization": {"stage": 1}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "gradient_predivide_factor": 2.0, "zero_optimization": {"stage": 1, "reduce_scatter": false}}
    Fix:    none
    Source: deepspeed/runtime/zero/stage_1_and_2.py, average_tensor
    """
    if averages(document) and not (zero_stage == 1 and scatters(document)):
        return
    where = "at zero_stage 1 with reduce_scatter" if averages(document) else "where gradients are summed"
    factor = number_at(document, PREDIVIDE, 1.0)
    if factor is not None and factor != 1.0:
        yield Hit(PREDIVIDE, f"gradient_predivide_factor is not read {where}", remedy="remove it")
    elif document.at("/prescale_gradients") is True:
        yield Hit("/prescale_gradients", f"prescale_gradients is not read {where}", remedy="remove it")


@rule("DSP311", "elastic-checkpoint", severity=WARNING, keys=[f"{ZERO}/elastic_checkpoint"])
def elastic_checkpoint(document: Document, zero_stage: int) -> Iterator[Hit]:
    """elastic_checkpoint has given way to universal checkpoints.

    Why:    At zero_stage 3 DeepSpeed warns and does nothing with it. At 1 and 2 it still changes how optimizer state is
            saved, so that the checkpoint needs the key again when it is loaded.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3, "elastic_checkpoint": true}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3}, "checkpoint": {"load_universal": true}}
    Fix:    none
    Source: deepspeed/runtime/zero/config.py, elastic_checkpoint_deprecated; deepspeed/runtime/zero/stage_1_and_2.py, state_dict
    """
    if on(document, f"{ZERO}/elastic_checkpoint"):
        effect = "has no effect" if zero_stage in (0, 3) else "is deprecated"
        yield Hit(
            f"{ZERO}/elastic_checkpoint",
            f"zero_optimization.elastic_checkpoint {effect} at zero_stage {zero_stage}",
            remedy="convert to a universal checkpoint, and set checkpoint.load_universal",
            on_key=True,
        )


@rule("DSP312", "prefetch-not-read", severity=WARNING, keys=[f"{ZERO}/stage3_allgather_sequential"])
def prefetch_not_read(document: Document, zero_stage: int) -> Iterator[Hit]:
    """stage3_allgather_sequential sets stage3_prefetch_bucket_size to 1.

    Why:    The engine overrides what is written there when it starts.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3, "stage3_allgather_sequential": true, "stage3_prefetch_bucket_size": 50000000}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3, "stage3_allgather_sequential": true}}
    Fix:    none
    Source: deepspeed/runtime/engine.py, _configure_zero_optimizer
    """
    sequential = any(on(document, f"{ZERO}/{name}") for name in ("stage3_allgather_sequential", "allgather_sequential"))
    for name in ("stage3_prefetch_bucket_size", "prefetch_bucket_size"):
        size = document.at(f"{ZERO}/{name}")
        if zero_stage == 3 and sequential and size not in (None, 1, "auto"):
            yield Hit(
                f"{ZERO}/{name}", f"{name} is 1 beside stage3_allgather_sequential", remedy="remove one of the two"
            )


@rule(
    "DSP313",
    "quantized-gradients-without-scatter",
    severity=ERROR,
    keys=[f"{ZERO}/zero_quantized_gradients"],
    raises="init",
)
def quantized_gradients_without_scatter(document: Document, zero_stage: int) -> Iterator[Hit]:
    """zero_quantized_gradients needs reduce_scatter.

    Why:    The engine asserts it when it starts.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3, "zero_quantized_gradients": true, "reduce_scatter": false}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3, "zero_quantized_gradients": true}}
    Fix:    none
    Source: deepspeed/runtime/zero/stage3.py, DeepSpeedZeroOptimizer_Stage3.__init__
    """
    if zero_stage == 3 and on(document, f"{ZERO}/zero_quantized_gradients") and not scatters(document):
        yield Hit(
            f"{ZERO}/reduce_scatter",
            "reduce_scatter is false, but zero_quantized_gradients needs it",
            remedy="set true, or remove zero_quantized_gradients",
        )


@rule(
    "DSP314", "weights-not-gathered-on-save", severity=INFO, keys=[f"{ZERO}/stage3_gather_16bit_weights_on_model_save"]
)
def weights_not_gathered_on_save(document: Document, zero_stage: int, hf_reader: str) -> Iterator[Hit]:
    """At zero_stage 3 a model is saved whole only with stage3_gather_16bit_weights_on_model_save.

    Why:    Without it HF Trainer saves DeepSpeed's checkpoint in the place of the model (zero_to_fp32.py makes one of it),
            Accelerate raises when it is asked for the weights, and save_16bit_model writes nothing.
    Given:  reader trainer
    Bad:    {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": 1.0, "zero_optimization": {"stage": 3}}
    Good:   {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": 1.0, "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": true}}
    Fix:    none
    Source: deepspeed/runtime/engine.py, save_16bit_model; accelerate/accelerator.py, get_state_dict
    """
    names = (
        "stage3_gather_16bit_weights_on_model_save",
        "gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save",
    )
    if (
        zero_stage == 3
        and document.at(f"{ZERO}/stage") != "auto"
        and not any(on(document, f"{ZERO}/{name}") or document.at(f"{ZERO}/{name}") == "auto" for name in names)
    ):
        yield Hit(
            ZERO,
            "stage3_gather_16bit_weights_on_model_save is false, so saving writes no whole model at zero_stage 3",
            remedy="set it to true",
            on_key=True,
        )
