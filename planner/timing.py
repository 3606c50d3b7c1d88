"""Seconds of one optimizer step: a roofline over the trace, the pipeline's bubble, and communication that nothing hides."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dsplan.planner.traffic import seconds, sums, traffic
from dsplan.schemas.cluster import Cluster, Gpu
from dsplan.schemas.estimate import StepTime
from dsplan.schemas.plan import Plan
from dsplan.schemas.trace import Trace
from dsplan.schemas.units import PRECISION_BYTES

MATMUL_EFFICIENCY = 0.70
"""Share of the dense peak that large matmuls reach. A fit on 13 published Megatron GPT step times on A100 (Narayanan et al.
2021, arXiv:2104.04473, Table 1; Korthikanti et al. 2022, arXiv:2205.05198, Table 5): mean error 2.7 to 4.2 % there,
unknown elsewhere."""
MEMORY_EFFICIENCY = 0.80
"""Share of the memory rate that elementwise sweeps reach. Set by judgement, not fitted."""
BACKWARD_PER_FORWARD = 2
"""Two matmuls of the same size per forward matmul: one for the input's gradient, one for the weight's. Where a trace has not
counted its backward."""
FP32 = 4


@dataclass(frozen=True, slots=True)
class _Work:
    """Seconds of one micro-batch on the slowest pipeline stage."""

    forward: float
    backward: float


def step_time(trace: Trace, plan: Plan, cluster: Cluster) -> StepTime:
    """Seconds and rates of one optimizer step. All None where the GPU or its rate is unknown, or nothing was traced.

    step = accumulation x (forward + backward) + optimizer sweep + bubble + exposed communication. mfu and
    model_flops_per_second_per_gpu count forward and the gradients that are made, 3 x forward where no weight is frozen, and
    never what is computed again (Chowdhery et al. 2022, arXiv:2204.02311, appendix B).
    """
    gpu = cluster.gpu
    rate = gpu.flops_per_second.get(plan.precision) if gpu else None
    if gpu is None or rate is None or not trace.segments or trace.forward_flops is None:
        return StepTime()
    work = _work(trace, plan, gpu, rate)
    micro_batch = work.forward + work.backward
    compute = plan.accumulation * micro_batch + _sweep(trace, plan, gpu)
    bubble = (plan.layout.pp - 1) * micro_batch
    exposed = _exposed(trace, plan, cluster, work)
    step = compute + bubble + exposed
    ranks = plan.layout.ranks
    model_flops = _model_flops(trace, trace.forward_flops) * plan.accumulation * plan.layout.dp / ranks
    samples = plan.global_batch / step
    return StepTime(
        step_seconds=step,
        compute_seconds=compute,
        exposed_communication_seconds=exposed,
        bubble_seconds=bubble,
        samples_per_second=samples,
        tokens_per_second_per_gpu=None if trace.seq_len is None else samples * trace.seq_len / ranks,
        model_flops_per_second_per_gpu=model_flops / step,
        mfu=model_flops / step / rate,
    )


def _model_flops(trace: Trace, forward_flops: float) -> float:
    """Of one micro-batch. A counted backward is above 2 x forward by the scores that fused attention makes again."""
    whole = BACKWARD_PER_FORWARD * forward_flops
    return forward_flops + (whole if trace.backward_flops is None else min(whole, trace.backward_flops))


def _work(trace: Trace, plan: Plan, gpu: Gpu, rate: float) -> _Work:
    """Matmuls at their rate, then the elementwise operators at the memory's; weights are read behind the matmuls."""
    assert trace.forward_flops is not None
    held = sums(trace)
    share = 1 / (plan.layout.tp * plan.layout.pp)
    byte_rate = gpu.memory_bytes_per_second * MEMORY_EFFICIENCY
    flop_rate = rate * MATMUL_EFFICIENCY
    backward_flops = trace.backward_flops
    if backward_flops is None:
        backward_flops = BACKWARD_PER_FORWARD * trace.forward_flops
    again_flops = trace.recompute_flops
    if again_flops is None:
        again_flops = held.blocks_flops if trace.recompute == "full" else 0.0
    param_seconds = PRECISION_BYTES[plan.precision] * share / byte_rate
    weights_seconds = held.params * param_seconds
    grads_seconds = held.trainable_params * param_seconds
    touched = (
        2 * _activations(trace) * share / byte_rate
    )  # each byte is written once and read once by the next operator
    forward = max(trace.forward_flops * share / flop_rate, weights_seconds) + touched
    backward = max(backward_flops * share / flop_rate, weights_seconds + grads_seconds) + BACKWARD_PER_FORWARD * touched
    again = again_flops * share / flop_rate + touched if again_flops or trace.recompute != "none" else 0.0
    return _Work(forward=forward, backward=backward + again)


def _activations(trace: Trace) -> int:
    """Bytes that one forward makes for backward, recomputed ones included: what each backward segment comes to hold and frees.

    Remembered per trace.
    """
    found = _remembered.get(id(trace))
    if found is not None and found[0] is trace:
        return found[1]
    if len(_remembered) > 256:
        _remembered.clear()
    made = sum(
        max(point.activation_bytes for point in segment.points) - segment.end.activation_bytes
        for segment in trace.segments
        if segment.phase == "backward" and segment.points
    )
    _remembered[id(trace)] = (trace, made)
    return made


_remembered: dict[int, tuple[Trace, int]] = {}


def _sweep(trace: Trace, plan: Plan, gpu: Gpu) -> float:
    """The optimizer reads and writes master and states and reads the gradient, once each, in fp32."""
    layout = plan.layout
    shards = layout.tp * layout.pp * (1 if plan.zero_stage == 0 else layout.dp_shard)
    touched = FP32 * (1 + 2 + 2 * plan.optimizer.states) * sums(trace).trainable_params / shards
    return touched / (gpu.memory_bytes_per_second * MEMORY_EFFICIENCY)


def _exposed(trace: Trace, plan: Plan, cluster: Cluster, work: _Work) -> float:
    """Communication that compute of the same direction cannot hide.

    tp collectives wait for their input and are waited for, so all of them show. dp collectives run beside the compute of
    their direction: gathers beside forward or backward, reductions beside the last backward, and what belongs to the step
    (the gather of updated parameters) beside the next forward. DeepSpeed without overlap_comm hides nothing.
    """
    if plan.accumulation > 3:  # micro-batches between the first and the last are equal
        two, three = (_exposed(trace, replace(plan, accumulation=few), cluster, work) for few in (2, 3))
        return two + (plan.accumulation - 2) * (three - two)
    overlaps = True
    if plan.engine == "deepspeed":
        overlap = plan.knobs.overlap_comm
        overlaps = plan.zero_stage == 3 if overlap is None else overlap
    exposed = 0.0
    beside: dict[tuple[str, int], float] = {}
    for sent in traffic(trace, plan):
        took = seconds(sent, plan.layout, cluster)
        if sent.axis == "tp" or not overlaps:
            exposed += took
            continue
        reduces = sent.move.value != "all_gather"
        direction = sent.event if sent.event != "step" else "backward" if reduces else "forward"
        key = (direction, sent.micro_batch)
        beside[key] = beside.get(key, 0.0) + took
    for (direction, _), took in beside.items():
        exposed += max(0.0, took - (work.forward if direction == "forward" else work.backward))
    return exposed
