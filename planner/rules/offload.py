"""DSP4xx: what lives on the host or on NVMe."""

from __future__ import annotations

from collections.abc import Iterator

from dsplan.planner.rules.mechanism import ERROR, WARNING, Hit, rule
from dsplan.planner.rules.precision import number_at, on
from dsplan.schemas.positions import Document

PARAM, OPTIMIZER = "/zero_optimization/offload_param", "/zero_optimization/offload_optimizer"


def _device(document: Document, block: str) -> str | None:
    device = document.at(f"{block}/device")
    return device if device in ("cpu", "nvme") else None


@rule("DSP401", "offload-param-below-stage-3", severity=WARNING, keys=[PARAM])
def offload_param_below_stage_3(document: Document, zero_stage: int) -> Iterator[Hit]:
    """offload_param acts at zero_stage 3 only.

    Why:    At other stages DeepSpeed accepts it silently, and parameters stay on the GPU.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    Fix:    none
    Source: deepspeed/runtime/engine.py, _configure_zero_optimizer
    """
    if zero_stage < 3 and _device(document, PARAM):
        yield Hit(
            PARAM,
            f"offload_param has no effect at zero_stage {zero_stage}: parameters stay on the GPU",
            remedy="set zero_optimization.stage to 3, or remove it",
            on_key=True,
        )


@rule("DSP402", "offload-optimizer-at-stage-0", severity=WARNING, keys=[OPTIMIZER])
def offload_optimizer_at_stage_0(document: Document, zero_stage: int) -> Iterator[Hit]:
    """offload_optimizer acts at zero_stage 1, 2 and 3.

    Why:    At stage 0 nothing is offloaded, and yet Adam becomes DeepSpeed's CPU Adam.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}
    Fix:    none
    Source: deepspeed/runtime/engine.py, _configure_basic_optimizer
    """
    if zero_stage == 0 and _device(document, OPTIMIZER):
        yield Hit(
            OPTIMIZER,
            "offload_optimizer offloads nothing at zero_stage 0, yet makes Adam DeepSpeed's CPU Adam",
            remedy="set zero_optimization.stage to 1 or more, or remove it",
            on_key=True,
        )


@rule(
    "DSP403", "nvme-without-path", severity=ERROR, keys=[f"{PARAM}/nvme_path", f"{OPTIMIZER}/nvme_path"], raises="init"
)
def nvme_without_path(document: Document, zero_stage: int) -> Iterator[Hit]:
    """device nvme needs nvme_path.

    Why:    The configuration is accepted; the engine fails when it starts.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nvme"}}}
    Fix:    none
    Source: deepspeed/runtime/zero/stage3.py; deepspeed/runtime/zero/partition_parameters.py
    """
    for block in (PARAM, OPTIMIZER):
        if zero_stage == 3 and _device(document, block) == "nvme" and document.at(f"{block}/nvme_path") is None:
            name = block.rpartition("/")[2]
            yield Hit(
                f"{block}/device", f"{name}.device is nvme, but there is no {name}.nvme_path", remedy="add nvme_path"
            )


@rule("DSP404", "nvme-below-stage-3", severity=WARNING, keys=[f"{OPTIMIZER}/device"])
def nvme_below_stage_3(document: Document, zero_stage: int) -> Iterator[Hit]:
    """offload_optimizer to nvme is offload to cpu at zero_stage 1 and 2.

    Why:    DeepSpeed silently keeps the state in host memory; nvme_path is not used.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    Fix:    none
    Source: deepspeed/runtime/zero/stage_1_and_2.py
    """
    if zero_stage in (1, 2) and _device(document, OPTIMIZER) == "nvme":
        yield Hit(
            f"{OPTIMIZER}/device",
            f"offload_optimizer.device nvme is cpu at zero_stage {zero_stage}: the state stays in host memory",
            remedy="write cpu, or set zero_optimization.stage to 3",
        )


@rule("DSP405", "ratio-below-stage-3", severity=ERROR, keys=[f"{OPTIMIZER}/ratio"], raises="parse")
def ratio_below_stage_3(document: Document, zero_stage: int) -> Iterator[Hit]:
    """offload_optimizer.ratio below 1 needs zero_stage 3.

    Why:    DeepSpeed refuses it at start-up, even where device is none.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}
    Fix:    none
    Source: deepspeed/runtime/zero/config.py, offload_ratio_check
    """
    ratio = 0.0 if document.at(f"{OPTIMIZER}/ratio") is False else number_at(document, f"{OPTIMIZER}/ratio", 1.0)
    if zero_stage != 3 and ratio is not None and 0 <= ratio < 1:
        yield Hit(
            f"{OPTIMIZER}/ratio",
            f"offload_optimizer.ratio is {ratio:g}, but must be 1 at zero_stage {zero_stage}",
            remedy="set 1, or set zero_optimization.stage to 3",
        )


@rule("DSP406", "super-offload-below-stage-3", severity=WARNING, keys=[f"{OPTIMIZER}/super_offload"])
def super_offload_below_stage_3(document: Document, zero_stage: int) -> Iterator[Hit]:
    """offload_optimizer.super_offload acts at zero_stage 3 only.

    Why:    At stages 1 and 2 DeepSpeed ignores it silently.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "super_offload": true}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": true}}}
    Fix:    none
    Source: deepspeed/runtime/engine.py, super_offload
    """
    if zero_stage < 3 and on(document, f"{OPTIMIZER}/super_offload"):
        yield Hit(
            f"{OPTIMIZER}/super_offload", f"super_offload has no effect at zero_stage {zero_stage}", remedy="set false"
        )
