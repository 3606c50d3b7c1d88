"""DSP87x and DSP88x: profilers, autotuning, the hybrid engine, and keys that only look as if they did something."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsplan.planner.rules.known_keys import title
from dsplan.planner.rules.mechanism import ERROR, INFO, WARNING, Hit, rule
from dsplan.planner.rules.pipeline import gpus
from dsplan.planner.rules.precision import on
from dsplan.planner.rules.reading import block, truthy, whole
from dsplan.schemas.positions import Document, shape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dsplan.schemas.cluster import Cluster

FLOPS, TUNING, HYBRID = "/flops_profiler", "/autotuning", "/hybrid_engine"
QUANTIZATION = "/weight_quantization"


@rule("DSP871", "profile-step-never-comes", severity=WARNING, keys=[f"{FLOPS}/profile_step"])
def profile_step_never_comes(document: Document) -> Iterator[Hit]:
    """flops_profiler.profile_step must be a step that comes: 0 or more, and whole.

    Why:    The profiler waits for the step of that number, and runs without a word where it never comes.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "flops_profiler": {"enabled": true, "profile_step": -1}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "flops_profiler": {"enabled": false, "profile_step": -1}}
    Fix:    none
    Source: deepspeed/runtime/engine.py, forward
    """
    step = whole(document, f"{FLOPS}/profile_step")
    if step is not None and step < 0 and truthy(document, f"{FLOPS}/enabled"):
        yield Hit(f"{FLOPS}/profile_step", f"flops_profiler.profile_step {step} never comes: nothing is profiled")


@rule("DSP872", "timing-slows-training", severity=INFO, keys=[f"{FLOPS}/enabled", "/wall_clock_breakdown"])
def timing_slows_training(document: Document) -> Iterator[Hit]:
    """Timers and memory reports are for looking into a run, not for long ones.

    Why:    wall_clock_breakdown, which flops_profiler switches on, synchronises the device around forward, backward and
            step; memory_breakdown prints at each of them.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "wall_clock_breakdown": true}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "wall_clock_breakdown": false}
    Fix:    none
    Source: deepspeed/runtime/engine.py; deepspeed/utils/timer.py, SynchronizedWallClockTimer
    """
    for pointer in (f"{FLOPS}/enabled", "/wall_clock_breakdown", "/memory_breakdown"):
        if document.at(pointer) is True:
            yield Hit(pointer, f"{title(pointer)} slows every step; leave it off in a long run")


@rule("DSP873", "autotuning-ends-run", severity=WARNING, keys=[f"{TUNING}/enabled"])
def autotuning_ends_run(document: Document) -> Iterator[Hit]:
    """With autotuning.enabled a run ends after end_profile_step.

    Why:    The engine takes the run for one of the autotuner's experiments, and exits. The key belongs to the launcher's
            --autotuning, which sets it by itself.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "autotuning": {"enabled": true}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "autotuning": {"enabled": false}}
    Fix:    none
    Source: deepspeed/runtime/engine.py, _autotuning_exit
    """
    if truthy(document, f"{TUNING}/enabled"):
        last = document.at(f"{TUNING}/end_profile_step", 5)
        yield Hit(
            f"{TUNING}/enabled",
            f"autotuning.enabled ends every run after step {shape(last)}",
            remedy="remove it unless deepspeed --autotuning starts the run",
        )


@rule("DSP874", "profile-window-empty", severity=ERROR, keys=[f"{TUNING}/start_profile_step"])
def profile_window_empty(document: Document) -> Iterator[Hit]:
    """autotuning.start_profile_step must not be above end_profile_step.

    Why:    The engine then ends before it has profiled anything: AttributeError in the last step.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "autotuning": {"enabled": false, "start_profile_step": 9}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "autotuning": {"enabled": false, "start_profile_step": 9, "end_profile_step": 12}}
    Fix:    none
    Source: deepspeed/runtime/engine.py, _autotuning_exit
    """
    start = document.at(f"{TUNING}/start_profile_step", 3)
    end = document.at(f"{TUNING}/end_profile_step", 5)
    if type(start) is int and type(end) is int and start > end:
        pointer = f"{TUNING}/start_profile_step"
        yield Hit(
            pointer if document.has(pointer) else f"{TUNING}/end_profile_step",
            f"autotuning.start_profile_step {start} is above end_profile_step {end}",
            remedy=f"set end_profile_step to {start} or more",
        )


@rule("DSP881", "hybrid-engine-uneven", severity=ERROR, keys=[f"{HYBRID}/inference_tp_size"])
def hybrid_engine_uneven(document: Document, cluster: Cluster) -> Iterator[Hit]:
    """hybrid_engine.inference_tp_size must divide the number of GPUs.

    Why:    The engine makes groups of so many GPUs, and those that are left over get none.
    Given:  dp 8
    Bad:    {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "hybrid_engine": {"enabled": true, "inference_tp_size": 3}}
    Good:   {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "hybrid_engine": {"enabled": true, "inference_tp_size": 2}}
    Fix:    none
    Source: deepspeed/runtime/hybrid_engine.py, DeepSpeedHybridEngine.create_inference_module
    """
    size = whole(document, f"{HYBRID}/inference_tp_size") or 1
    if on(document, f"{HYBRID}/enabled") and size > 1 and cluster.ranks % size:
        yield Hit(
            f"{HYBRID}/inference_tp_size",
            f"hybrid_engine.inference_tp_size is {size}, which does not divide {gpus(cluster)}",
        )


@rule("DSP882", "no-cuda-graph", severity=WARNING, keys=[f"{HYBRID}/enable_cuda_graph"])
def no_cuda_graph(document: Document, zero_stage: int) -> Iterator[Hit]:
    """hybrid_engine.enable_cuda_graph goes neither with zero_stage 3 nor with tensor parallelism or a released cache.

    Why:    The engine then goes on without CUDA graphs.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3}, "hybrid_engine": {"enabled": true, "enable_cuda_graph": true}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2}, "hybrid_engine": {"enabled": true, "enable_cuda_graph": true}}
    Fix:    none
    Source: deepspeed/runtime/hybrid_engine_graph.py, validate_cuda_graph_support
    """
    pointer = f"{HYBRID}/enable_cuda_graph"
    if not on(document, pointer) or not on(document, f"{HYBRID}/enabled"):
        return
    reason = None
    if zero_stage == 3:
        reason = "zero_stage 3"
    elif on(document, f"{HYBRID}/release_inference_cache"):
        reason = "release_inference_cache"
    elif (whole(document, f"{HYBRID}/inference_tp_size") or 1) > 1:
        reason = "inference_tp_size above 1"
    if reason:
        yield Hit(pointer, f"enable_cuda_graph has no effect with {reason}", remedy="set false")


@rule("DSP883", "weights-not-quantized", severity=WARNING, keys=[QUANTIZATION])
def weights_not_quantized(document: Document) -> Iterator[Hit]:
    """Of weight_quantization training reads only quantized_initialization.

    Why:    DeepSpeed stores the rest for inference. enabled, true by default, quantises nothing.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "weight_quantization": {"enabled": true, "num_bits": 4}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "weight_quantization": {"quantized_initialization": {"num_bits": 4, "group_size": 64}}}
    Fix:    none
    Source: deepspeed/runtime/zero/partition_parameters.py, Init._configure_quantized_initialization
    """
    values = block(document, QUANTIZATION)
    if values and not values.get("quantized_initialization") and values.get("enabled") is not False:
        yield Hit(
            QUANTIZATION,
            "weight_quantization quantises nothing in training: only quantized_initialization is read",
            on_key=True,
        )


@rule("DSP884", "vocabulary-not-aligned", severity=WARNING, keys=["/vocabulary_size"])
def vocabulary_not_aligned(document: Document) -> Iterator[Hit]:
    """vocabulary_size should be a multiple of 8.

    Why:    Matrix multiplications are slower with other sizes; DeepSpeed warns in its log. It uses the key for nothing
            else, so it is the model's embedding that has to be padded.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "vocabulary_size": 50257}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "vocabulary_size": 50304}
    Fix:    none
    Source: deepspeed/runtime/config.py, _do_warning_check
    """
    size = whole(document, "/vocabulary_size")
    if size is not None and size % 8:
        yield Hit(
            "/vocabulary_size",
            f"vocabulary_size {size} is no multiple of 8",
            remedy=f"pad the model's embedding to {(size // 64 + 1) * 64}",
        )
