"""DSP4xx: what lives on the host or on NVMe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsplan.planner.rules.mechanism import ERROR, INFO, WARNING, Hit, rule
from dsplan.planner.rules.precision import number_at, on

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dsplan.schemas.config import DsConfig
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
    Since:  0.15.4
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


_ADAMS = ("adam", "adamw")


def _on_host(document: Document, block: str) -> bool:
    return _device(document, block) is not None


def _cpu_adam(config: DsConfig) -> bool | None:
    """The optimizer of the file becomes DeepSpeed's CPU Adam when it is offloaded; None where the file names none."""
    if config.optimizer is None:
        return None
    return config.optimizer.type.lower() in _ADAMS and not config.optimizer.params.get("torch_adam")


@rule("DSP407", "ratio-without-cpu-adam", severity=ERROR, keys=[f"{OPTIMIZER}/ratio"], raises="init")
def ratio_without_cpu_adam(document: Document, zero_stage: int, config: DsConfig) -> Iterator[Hit]:
    """offload_optimizer.ratio below 1 needs Adam or AdamW, and not torch's.

    Why:    DeepSpeed updates a part on the host with its CPU Adam and the rest on the GPU, and asserts that it has one.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "Adagrad", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}
    Fix:    none
    Source: deepspeed/runtime/zero/stage3.py, DeepSpeedZeroOptimizer_Stage3.__init__
    """
    ratio = number_at(document, f"{OPTIMIZER}/ratio", 1.0)
    split = zero_stage == 3 and _on_host(document, OPTIMIZER) and ratio is not None and 0 <= ratio < 1
    if split and _cpu_adam(config) is False and config.optimizer is not None:
        kind = "torch's Adam" if config.optimizer.type.lower() in _ADAMS else config.optimizer.type
        yield Hit(
            f"{OPTIMIZER}/ratio",
            f"offload_optimizer.ratio is {ratio:g}, which needs DeepSpeed's CPU Adam, but the optimizer is {kind}",
            remedy="set 1, or take AdamW",
        )


@rule("DSP408", "offload-without-device", severity=WARNING, keys=[f"{PARAM}/device", f"{OPTIMIZER}/device"])
def offload_without_device(document: Document) -> Iterator[Hit]:
    """A block for offload without a device offloads nothing.

    Why:    device is none where it is not there, whatever else the block says.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2, "offload_optimizer": {"pin_memory": true}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": true}}}
    Fix:    none
    Source: deepspeed/runtime/zero/offload_config.py
    """
    for pointer in (PARAM, OPTIMIZER):
        block = document.at(pointer)
        if isinstance(block, dict) and "device" not in block:
            name = pointer.rpartition("/")[2]
            yield Hit(
                pointer, f"{name} has no device, so nothing is offloaded", remedy='add "device": "cpu"', on_key=True
            )


_NVME_ONLY = {
    PARAM: ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu"),
    OPTIMIZER: ("nvme_path", "buffer_count", "pipeline_read", "pipeline_write", "fast_init"),
}
"""Source: deepspeed/runtime/zero/offload_config.py; deepspeed/runtime/swap_tensor."""


@rule("DSP409", "nvme-key-without-nvme", severity=INFO, keys=[PARAM, OPTIMIZER])
def nvme_key_without_nvme(document: Document, zero_stage: int) -> Iterator[Hit]:
    """Keys for NVMe have no effect where the device is cpu or none.

    Why:    Nothing is swapped to files, so paths and buffers are not looked at. At zero_stage 3 only; below, nothing is
            ever swapped (DSP404).
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "nvme_path": "/nvme"}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nvme"}}}
    Fix:    none
    Source: deepspeed/runtime/swap_tensor/partitioned_param_swapper.py; deepspeed/runtime/swap_tensor/optimizer_utils.py
    """
    for pointer, names in _NVME_ONLY.items():
        block, device = document.at(pointer), document.at(f"{pointer}/device")
        if zero_stage != 3 or not isinstance(block, dict) or device not in ("cpu", "none"):
            continue
        idle = [name for name in names if block.get(name) not in (None, False, "auto")]
        if idle:
            yield Hit(
                f"{pointer}/{idle[0]}",
                f"{', '.join(idle)} of {pointer.rpartition('/')[2]} {'has' if len(idle) == 1 else 'have'} no effect "
                f"with device {device}",
                remedy="remove, or set device to nvme",
                on_key=True,
            )


_ADAM_TENSORS = 4
"""Parameter, gradient, momentum and variance. Source: deepspeed/runtime/zero/offload_config.py, buffer_count."""


@rule("DSP410", "too-few-swap-buffers", severity=WARNING, keys=[f"{OPTIMIZER}/buffer_count"])
def too_few_swap_buffers(document: Document, zero_stage: int) -> Iterator[Hit]:
    """offload_optimizer.buffer_count should be at least 4 with nvme and Adam.

    Why:    A sub-group is read into one buffer per tensor of it: parameter, gradient and two moments. With fewer the first
            step fails on an assertion.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 2}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 4}}}
    Fix:    none
    Source: deepspeed/runtime/swap_tensor/partitioned_optimizer_swapper.py, swap_in_optimizer_state
    """
    count = number_at(document, f"{OPTIMIZER}/buffer_count", float(_ADAM_TENSORS))
    kind = document.at("/optimizer/type")
    if zero_stage != 3 or _device(document, OPTIMIZER) != "nvme" or count is None:
        return
    if count < _ADAM_TENSORS and (not isinstance(kind, str) or kind.lower() in _ADAMS):
        yield Hit(
            f"{OPTIMIZER}/buffer_count",
            f"offload_optimizer.buffer_count is {count:g}, but Adam has {_ADAM_TENSORS} tensors to swap in at once",
            remedy=f"set {_ADAM_TENSORS} or more",
        )


@rule("DSP411", "ratio-without-offload", severity=WARNING, keys=[f"{OPTIMIZER}/ratio", f"{OPTIMIZER}/super_offload"])
def ratio_without_offload(document: Document, zero_stage: int) -> Iterator[Hit]:
    """offload_optimizer.ratio and cpuadam_cores_perc act beside what they belong to only.

    Why:    A ratio splits an optimizer that is offloaded; with device none nothing is. cpuadam_cores_perc is read by
            super_offload alone.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "none", "ratio": 0.5}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}
    Fix:    none
    Source: deepspeed/runtime/zero/stage3.py; deepspeed/runtime/zero/offload_config.py
    """
    ratio = number_at(document, f"{OPTIMIZER}/ratio", 1.0)
    off = document.at(f"{OPTIMIZER}/device") == "none"
    if zero_stage == 3 and off and ratio is not None and 0 <= ratio < 1:
        yield Hit(
            f"{OPTIMIZER}/ratio",
            f"offload_optimizer.ratio is {ratio:g}, but with device none nothing is offloaded",
            remedy='set device to "cpu", or remove it',
        )
    cores = document.at(f"{OPTIMIZER}/cpuadam_cores_perc")
    if cores not in (None, "auto") and not on(document, f"{OPTIMIZER}/super_offload"):
        yield Hit(
            f"{OPTIMIZER}/cpuadam_cores_perc",
            "offload_optimizer.cpuadam_cores_perc has no effect without super_offload",
            remedy="remove it",
            severity=INFO,
        )
