"""What DeepSpeed 0.19.8 allocates, and when: flat buffers, buckets and gathered parameters, laid over the trace.

Source: deepspeed/runtime/zero/{stage_1_and_2,stage3,partition_parameters,partitioned_param_coordinator}.py,
deepspeed/runtime/{engine,fp16/fused_optimizer,fp16/unfused_optimizer}.py of 0.19.8.
"""

from __future__ import annotations

import numpy as np
from dsplan.planner.memory.replay import (
    END,
    START,
    Bytes,
    Layer,
    Timeline,
    activation_layer,
    items_at,
    one_gradient,
    peaks,
    timelines,
)
from dsplan.planner.memory.shards import local_numel, outside_blocks, part_of, shards
from dsplan.schemas.ledger import Ledger, Moment
from dsplan.schemas.plan import Plan
from dsplan.schemas.trace import Trace
from dsplan.schemas.units import PRECISION_BYTES, count
from numpy.typing import NDArray

FP32 = 4
ALIGNMENT = 2
"""Elements per rank to which a flat group is padded. Source: stage_1_and_2.py, nccl_start_alignment_factor."""
PLAIN_BUCKET = 500_000_000
"""Elements of an all-reduce at stage 0. Source: engine.py, MEMORY_OPT_ALLREDUCE_SIZE."""


def ledgers(trace: Trace, plan: Plan) -> tuple[Ledger, ...]:
    """One ledger per pipeline stage."""
    stages = timelines(trace, plan.layout.pp) or (None,)
    kind = {0: _Plain, 3: _Gathered}.get(plan.zero_stage, _Partitioned)
    return tuple(kind(trace, plan, stage).ledger() for stage in stages)


class _Rank:
    """One rank: what all stages share. Elements: numel of all parameters here, trained of those with gradients."""

    def __init__(self, trace: Trace, plan: Plan, timeline: Timeline | None):
        layout = plan.layout
        self.trace, self.plan, self.timeline, self.knobs = trace, plan, timeline, plan.knobs
        self.degree = layout.dp
        self.width = PRECISION_BYTES[plan.precision]
        self.mixed = self.width < FP32
        self.units = list(timeline.units) if timeline else list(range(len(trace.units)))
        part = part_of(layout.pp, timeline.pp_stage if timeline else 0)
        self.sizes = shards(trace, layout.tp, 1, part)
        self.params = [
            param
            for unit in self.units
            for param in (trace.units[unit].params if unit else outside_blocks(trace, part))
        ]
        self.numel = int(self.sizes.whole[self.units].sum())
        self.trained = int(self.sizes.trainable[self.units].sum())
        self.tensors = int(self.sizes.tensors[self.units].sum())
        self.largest = self.sizes.largest
        overlap = plan.knobs.overlap_comm
        self.overlap = plan.zero_stage == 3 if overlap is None else overlap

    def ledger(self) -> Ledger:
        states = self.states()
        moments: list[Moment] = []
        timeline = self.timeline
        if timeline is not None:
            activations = activation_layer(timeline, self.plan.layout, self.plan.accumulation)
            moments = peaks(timeline, [*states, activations, *self.moving(timeline)])
        left = int(timeline.activation[-1]) if timeline is not None else 0
        loop = Layer("activations", left, "inputs and what the loop still holds")
        moments.append(Moment(phase="step", where="optimizer step", items=items_at([*states, loop, *self.step()], 0)))
        return Ledger(
            engine="deepspeed",
            level="formula",
            moments=tuple(moments),
            resident_bytes=sum(int(layer.bytes) for layer in states),
            host_bytes=self.host_bytes(),
        )

    def states(self) -> list[Layer]:
        raise NotImplementedError

    def moving(self, timeline: Timeline) -> list[Layer]:
        raise NotImplementedError

    def step(self) -> list[Layer]:
        raise NotImplementedError

    def host_bytes(self) -> int:
        return 0

    # Parts of several stages

    def buffers(self) -> Layer:
        return Layer("params", self.trace.buffer_bytes, "buffers of the model")

    def optimizer_states(self, numel: int, tensors: int) -> list[Layer]:
        """Optimizer state of numel fp32 elements, and one step counter per tensor."""
        optimizer = self.plan.optimizer
        state = FP32 * optimizer.states * numel + FP32 * tensors * bool(optimizer.states)
        return [Layer("optimizer", state, f"{optimizer.name}: {optimizer.states} x 4 B x {self.per_rank(numel)}")]

    def kernel(self, numel: int, largest: int) -> list[Layer]:
        """Temporaries of the optimizer over numel elements, the largest tensor being `largest`."""
        optimizer = self.plan.optimizer
        if optimizer.kernel == "fused" or not optimizer.states:
            return []
        if optimizer.kernel == "foreach":
            return [Layer("temporary", FP32 * numel, f"foreach {optimizer.name}: 4 B x {count(numel)}")]
        return [Layer("temporary", 2 * FP32 * largest, f"for-loop {optimizer.name}: 2 x 4 B x {count(largest)}")]

    def per_rank(self, numel: int) -> str:
        return f"{count(numel)} elements of this rank" + (f" (dp {self.degree})" if self.degree > 1 else "")

    def whole_gradients(self, timeline: Timeline, kept: bool) -> Bytes:
        """By row: gradients that nothing removes before the end of backward; kept: also from earlier micro-batches."""
        if kept:
            return np.full(timeline.segment.shape, self.width * self.trained, dtype=np.int64)
        earlier = self.width * (timeline.block_done @ self.sizes.trainable)
        outside = np.ceil(timeline.root_grad * self.sizes.ratio[0]).astype(np.int64)
        done = np.where(timeline.backward, earlier + outside, 0)
        own = timeline.grad * self.sizes.ratio[timeline.unit[timeline.segment]]
        return done[timeline.segment] + np.ceil(own).astype(np.int64)

    def one_gradient(self, timeline: Timeline) -> Bytes:
        """By row: the gradient of one parameter, which is taken away as soon as it is whole."""
        width, sizes = self.width, self.sizes
        outside = timeline.root_grad[timeline.segment]
        return one_gradient(timeline, timeline.grad, outside, width * sizes.largest_by_unit, width * sizes.trainable)

    def flushed(self, timeline: Timeline) -> NDArray[np.bool_]:
        """Rows before which the reduce bucket was full at least once, and the last one."""
        outside = np.where(timeline.unit > 0, timeline.root_grad, 0)
        opening = int(np.argmax(timeline.backward))
        before = timeline.grad[(timeline.segment == len(timeline.unit) - 1) & (timeline.kind == START)]
        outside[-1] = before[0] if opening < len(timeline.unit) - 1 else 0
        reduced = timeline.block_done @ self.sizes.trainable + outside // self.width
        full = timeline.backward & (reduced > self.knobs.reduce_bucket_size)
        found: NDArray[np.bool_] = full[timeline.segment] | self.at_end(timeline)
        return found

    def in_backward(self, timeline: Timeline) -> NDArray[np.bool_]:
        """Rows of backward after the loss's own, that is, since the first gradient of a parameter."""
        backward = timeline.backward[timeline.segment]
        opening = np.argmax(timeline.backward)
        loss = (timeline.segment == opening) & (timeline.grad == 0) & (timeline.unit[opening] == 0)
        found: NDArray[np.bool_] = backward & ~loss
        return found

    def at_end(self, timeline: Timeline) -> NDArray[np.bool_]:
        """The last row."""
        last: NDArray[np.bool_] = np.arange(len(timeline.segment)) == len(timeline.segment) - 1
        return last


class _Plain(_Rank):
    """Stage 0: everything on every rank; gradients all-reduced after backward in one flat copy."""

    def states(self) -> list[Layer]:
        masters = FP32 * self.trained if self.mixed else 0
        return [
            self.buffers(),
            Layer("params", self.width * self.numel, f"{self.width} B x {count(self.numel)} params"),
            Layer("optimizer", masters, f"fp32 master: 4 B x {count(self.trained)} params"),
            *self.optimizer_states(self.trained, self.tensors),
        ]

    def moving(self, timeline: Timeline) -> list[Layer]:
        grads = self.whole_gradients(timeline, self.plan.accumulation > 1)
        layers = [Layer("grads", grads, f"{self.width} B x gradients up to here, all kept")]
        if self.degree > 1:
            flat = self.width * min(self.trained, PLAIN_BUCKET + self.largest)
            bucket = np.where(self.at_end(timeline), flat, 0)
            layers.append(Layer("buckets", bucket, "flat copy of the gradients for the all-reduce"))
        return layers

    def step(self) -> list[Layer]:
        layers = [Layer("grads", self.width * self.trained, f"{self.width} B x {count(self.trained)} gradients")]
        fused = self.plan.optimizer.kernel == "fused"
        if self.mixed:
            layers.append(Layer("grads", FP32 * self.trained, f"fp32 copies: 4 B x {count(self.trained)}"))
            if fused:  # one flat group: copies of each, then all in one
                layers.append(Layer("temporary", FP32 * self.trained, "the same once more, flattened"))
        flat = self.trained if self.mixed and fused else self.largest
        return layers + self.kernel(self.trained, flat)


class _Partitioned(_Rank):
    """Stages 1 and 2: whole parameters in one flat buffer, fp32 masters and state of one partition."""

    def __init__(self, trace: Trace, plan: Plan, timeline: Timeline | None):
        super().__init__(trace, plan, timeline)
        unit = ALIGNMENT * self.degree
        self.flat = -(-self.trained // unit) * unit
        self.part = self.flat // self.degree
        self.offloads = plan.offload != "none"

    def states(self) -> list[Layer]:
        frozen = self.numel - self.trained
        layers = [
            self.buffers(),
            Layer("params", self.width * (self.flat + frozen), f"{self.width} B x {count(self.numel)} params"),
        ]
        if self.offloads:
            layers.append(Layer("buckets", self.width * self.largest, "buffer of the largest gradient on its way out"))
            return layers
        why = f"fp32 master: 4 B x {self.per_rank(self.part)}"
        return [*layers, Layer("optimizer", FP32 * self.part, why), *self.optimizer_states(self.part, 1)]

    def host_bytes(self) -> int:
        """Master, gradient and states in fp32, the partition in the compute dtype, buffers of the largest gradient."""
        if not self.offloads:
            return 0
        fp32 = FP32 * (2 + self.plan.optimizer.states) * self.part
        summed = self.width * self.part if self.plan.accumulation > 1 else 0
        return fp32 + self.width * self.part + self.width * self.largest + summed

    def moving(self, timeline: Timeline) -> list[Layer]:
        knobs, width = self.knobs, self.width
        backward, since, end = timeline.backward[timeline.segment], self.in_backward(timeline), self.at_end(timeline)
        again = self.plan.accumulation > 1
        waits = self.plan.zero_stage == 1 and not self.overlap  # nothing is reduced before the end
        part = 0 if self.offloads else width * self.part
        bucket = width * knobs.reduce_bucket_size * (2 if self.overlap else 1) if knobs.contiguous_gradients else 0
        flat = width * min(knobs.reduce_bucket_size, self.trained)
        layers = []
        if waits:
            held = self.whole_gradients(timeline, again)
            layers.append(Layer("grads", held, f"{width} B x gradients up to here, kept until the step ends"))
            layers.append(
                Layer("grads", np.where(end, part, 0), f"own partition: {width} B x {self.per_rank(self.part)}")
            )
            layers.append(
                Layer(
                    "buckets", np.where(backward | again, bucket, 0), f"reduce bucket: {width} B x reduce_bucket_size"
                )
            )
            return layers
        grads = self.one_gradient(timeline)
        if self.plan.zero_stage == 1:  # those too large for the bucket stay till the end
            large = sum(
                local_numel(param, self.plan.layout.tp)
                for param in self.params
                if param.trainable and local_numel(param, self.plan.layout.tp) > knobs.reduce_bucket_size
            )
            grads = np.maximum(grads, np.where(end, width * large, 0))
        layers.append(Layer("grads", grads, f"{width} B x the largest gradients before they are reduced"))
        why = f"own partition: {width} B x {self.per_rank(self.part)}"
        layers.append(Layer("grads", np.where(self.flushed(timeline), part, 0), why))
        if again:
            layers.append(Layer("grads", part, f"{why}, summed over micro-batches"))
        layers.append(
            Layer(
                "buckets",
                np.where(backward, bucket, 0),
                f"reduce bucket: {width} B x {count(knobs.reduce_bucket_size)}"
                + (" x 2 (overlap_comm)" if self.overlap else ""),
            )
        )
        # reducing flattens the bucket once more; a gradient too large for it is reduced where it is
        copied = np.where(since & (timeline.kind == END), flat, 0)
        layers.append(Layer("temporary", np.maximum(0, copied - grads), "flat copy of what the bucket holds"))
        return layers

    def step(self) -> list[Layer]:
        if self.offloads:
            return []
        low, high = self.width * self.part, FP32 * self.part
        kernel = self.kernel(self.part, self.part)
        extra = sum(int(layer.bytes) for layer in kernel)
        # first the averaged pieces, the flat copy of them, and that in fp32; then fp32 and the kernel alone
        copying = 2 * low + (high if self.mixed else 0)
        layers = [Layer("grads", high, f"fp32: 4 B x {self.per_rank(self.part)}"), *kernel]
        if copying > high + extra:
            layers = [
                Layer("grads", copying, f"own partition in pieces, flattened, and in fp32: {self.per_rank(self.part)}")
            ]
        return layers


class _Gathered(_Rank):
    """Stage 3: every parameter split over the ranks; the coordinator gathers, keeps and prefetches."""

    def __init__(self, trace: Trace, plan: Plan, timeline: Timeline | None):
        super().__init__(trace, plan, timeline)
        tp, degree = plan.layout.tp, self.degree
        self.shard = self.trained_shard = self.persistent = self.largest_shard = 0
        for param in self.params:
            numel = local_numel(param, tp)
            part = -(-numel // degree)
            self.shard += part
            self.largest_shard = max(self.largest_shard, part)
            self.trained_shard += part if param.trainable else 0
            self.persistent += numel if numel <= plan.knobs.param_persistence_threshold else 0

    def states(self) -> list[Layer]:
        width, knobs, offload = self.width, self.knobs, self.plan.offload
        layers = [self.buffers()]
        if offload != "param":
            layers.append(Layer("params", width * self.shard, f"{width} B x {self.per_rank(self.shard)}"))
        if self.degree > 1:
            why = f"{width} B x {count(self.persistent)} params up to stage3_param_persistence_threshold stay gathered"
            layers.append(Layer("gathered_params", width * self.persistent, why))
        if offload == "none":
            part = self.trained_shard
            layers.append(Layer("optimizer", FP32 * part, f"fp32 master: 4 B x {self.per_rank(part)}"))
            groups = -(-part // max(1, min(knobs.sub_group_size, part)))
            layers += self.optimizer_states(part, groups)
            layers.append(Layer("grads", width * part, f"gradient partition, always there: {width} B x {count(part)}"))
        if knobs.contiguous_gradients:
            why = f"reduce bucket, always there: {width} B x {count(knobs.reduce_bucket_size)}"
            layers.append(Layer("buckets", width * knobs.reduce_bucket_size, why))
        return layers

    def host_bytes(self) -> int:
        if self.plan.offload == "none":
            return 0
        part = self.trained_shard
        fp32 = FP32 * (2 + self.plan.optimizer.states) * part
        return fp32 + self.width * part + (self.width * self.shard if self.plan.offload == "param" else 0)

    def moving(self, timeline: Timeline) -> list[Layer]:
        width, knobs = self.width, self.knobs
        layers = []
        movable = self.numel - self.persistent
        if self.degree > 1 and movable > 0:
            ahead = knobs.prefetch_bucket_size
            sizes = self.sizes.whole
            inside = timeline.unit > 0
            # forward meets blocks one by one; what it met stays while max_live_parameters allows
            own = np.where(inside, sizes[timeline.unit], self.largest)
            met = np.where(
                timeline.backward, self.numel, timeline.block_visits @ sizes + int(sizes[0]) * (0 in self.units)
            )
            live = np.minimum(
                np.minimum(met + ahead, movable), np.maximum(knobs.max_live_parameters, self.largest) + ahead
            )
            live = np.where(
                timeline.backward, np.minimum(live, np.maximum(movable - timeline.block_done @ sizes, own)), live
            )
            arriving = np.minimum(np.minimum(ahead + self.largest, movable), live)
            rows = timeline.rows(live, live, live)
            layers.append(
                Layer(
                    "gathered_params", width * rows, lambda row: f"{width} B x {count(int(rows[row]))} params gathered"
                )
            )
            # the coalesced buffer is as large as what arrives in it
            first = np.arange(len(timeline.unit)) == 0
            fetches = first if movable <= ahead else np.ones_like(first)
            flat = np.where(fetches, arriving, 0)
            inner = np.where(inside | first, np.minimum(flat, np.where(first, flat, ahead)), 0)
            buffers = timeline.rows(flat, inner, 0 * flat)
            layers.append(
                Layer("gathered_params", width * buffers, f"{width} B x params in the all-gather's flat buffer")
            )
        since = self.in_backward(timeline)
        grads = self.one_gradient(timeline)
        layers.append(Layer("grads", grads, f"{width} B x one gradient before it is reduced"))
        scattered = width * min(knobs.reduce_bucket_size, self.trained)
        copied = np.where(since & (timeline.kind != START), scattered, 0)
        layers.append(Layer("temporary", np.maximum(0, copied - grads), "flat copy of what the bucket holds"))
        if self.plan.offload != "none":
            part = np.where(since, width * -(-min(knobs.reduce_bucket_size, self.trained) // self.degree), 0)
            layers.append(Layer("temporary", part, "reduced gradients on their way to the host"))
        return layers

    def step(self) -> list[Layer]:
        if self.plan.offload != "none":
            return []
        part = min(self.trained_shard, self.knobs.sub_group_size + self.largest_shard)
        return [Layer("grads", FP32 * part, f"one sub-group in fp32: 4 B x {count(part)}"), *self.kernel(part, part)]
