"""What the bundled runtime allocates, and when: FSDP2's shards, gathers and reductions, laid over the trace.

Source: torch 2.13, torch/distributed/fsdp/_fully_shard/{_fsdp_param_group,_fsdp_collectives,_fsdp_param}.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from dsplan.planner.memory.replay import (
    END,
    Bytes,
    Layer,
    Timeline,
    activation_layer,
    items_at,
    one_gradient,
    peaks,
    timelines,
)
from dsplan.planner.memory.shards import Shards, part_of, shards
from dsplan.schemas.layout import PARTIAL, ZERO
from dsplan.schemas.ledger import Ledger, Moment
from dsplan.schemas.plan import Plan
from dsplan.schemas.trace import Trace
from dsplan.schemas.units import PRECISION_BYTES, count

FP32 = 4


def ledgers(trace: Trace, plan: Plan) -> tuple[Ledger, ...]:
    """One ledger per pipeline stage."""
    stages = timelines(trace, plan.layout.pp) or (None,)
    return tuple(_Rank(trace, plan, stage).ledger() for stage in stages)


@dataclass(frozen=True, slots=True)
class _Sums:
    """Elements of all units of this rank."""

    whole: int
    padded: int
    shard: int
    trainable: int
    trainable_shard: int
    tensors: int


@dataclass(frozen=True, slots=True)
class _Pass:
    """Where in the accumulation a micro-batch stands: gathers come with the first, reductions wait for the last."""

    first: bool
    last: bool


_ONLY, _FIRST, _MIDDLE, _LAST = _Pass(True, True), _Pass(True, False), _Pass(False, False), _Pass(False, True)


class _Rank:
    """One rank of one pipeline stage under one plan."""

    def __init__(self, trace: Trace, plan: Plan, timeline: Timeline | None):
        layout = plan.layout
        self.trace, self.plan, self.timeline = trace, plan, timeline
        self.degree = 1 if plan.zero_stage == 0 else layout.dp_shard
        part = part_of(layout.pp, timeline.pp_stage if timeline else 0)
        self.sizes: Shards = shards(trace, layout.tp, self.degree, part)
        self.units = list(timeline.units) if timeline else list(range(len(trace.units)))
        # of the compute dtype, in which gradients are reduced too
        self.width = PRECISION_BYTES[plan.precision]
        self.mixed = self.width < FP32
        names = ("whole", "padded", "shard", "trainable", "trainable_shard", "tensors")
        self.sums = _Sums(*(int(getattr(self.sizes, name)[self.units].sum()) for name in names))

    def ledger(self) -> Ledger:
        on_device = self.states()
        moments: list[Moment] = []
        if self.timeline is not None:
            moments = self.moments(self.timeline, on_device)
        last = self.timeline.activation[-1:] if self.timeline is not None else np.zeros(1, dtype=np.int64)
        moments.append(Moment(phase="step", where="optimizer step", items=items_at(on_device + self.step(last), 0)))
        resident = sum(int(layer.bytes) for layer in on_device)
        return Ledger(
            engine="native",
            level="formula",
            moments=tuple(moments),
            resident_bytes=resident,
            host_bytes=self.host_bytes(),
        )

    # What is there all the time

    def states(self) -> list[Layer]:
        """Masters, buffers and optimizer state, as far as they are on the device."""
        sums, optimizer, offload = self.sums, self.plan.optimizer, self.plan.offload
        masters = FP32 * sums.shard
        layers = [Layer("params", self.trace.buffer_bytes, "buffers of the model")]
        if offload != "param":
            layers.append(Layer("params", masters, f"fp32 master: 4 B x {self.per_shard(sums.whole)}"))
        if offload == "none":
            state = FP32 * optimizer.states * sums.trainable_shard + FP32 * sums.tensors * bool(optimizer.states)
            why = f"{optimizer.name}: {optimizer.states} x 4 B x {self.per_shard(sums.trainable)}"
            layers.append(Layer("optimizer", state, why))
        return layers

    def host_bytes(self) -> int:
        """Offloaded masters, state and gradients."""
        sums, offload = self.sums, self.plan.offload
        if offload == "none":
            return 0
        return FP32 * sums.shard + FP32 * (self.plan.optimizer.states + 1) * sums.trainable_shard

    def per_shard(self, numel: int) -> str:
        return f"{count(numel)} params" + (f" / dp {self.degree}" if self.degree > 1 else "")

    # What comes and goes in forward and backward

    def moments(self, timeline: Timeline, states: list[Layer]) -> list[Moment]:
        """The peaks of forward and backward, over the micro-batches of a step that differ."""
        kinds = {1: [_ONLY], 2: [_FIRST, _LAST]}.get(self.plan.accumulation, [_FIRST, _MIDDLE, _LAST])
        best: dict[str, Moment] = {}
        activations = activation_layer(timeline, self.plan.layout, self.plan.accumulation)
        for pass_ in kinds:
            layers = [*states, activations, *self.gathered(timeline, pass_), *self.gradients(timeline, pass_)]
            for moment in peaks(timeline, layers):
                if moment.phase not in best or moment.allocated_bytes > best[moment.phase].allocated_bytes:
                    best[moment.phase] = moment
        return list(best.values())

    def gathered(self, timeline: Timeline, pass_: _Pass) -> list[Layer]:
        """Unsharded copies in the compute dtype, and the flat buffers they are copied out of."""
        pad, unit, backward = self.sizes.padded, timeline.unit, timeline.backward
        block = np.where(unit > 0, unit, -1)
        everything = self.sums.padded
        root = int(pad[0]) if 0 in timeline.units else 0
        ends = (
            np.arange(len(unit)) == len(unit) - 1
        )  # what lies outside the blocks is reduced and dropped at the very end
        if self.plan.zero_stage == 3:  # a block is dropped after use
            during = root + pad[block]
            after = np.where(ends & pass_.last, 0, root)
        elif not pass_.last:  # all kept for the next micro-batch
            seen = root + timeline.block_visits @ pad if pass_.first else everything
            during = after = np.where(backward, everything, seen)
        else:  # each kept until its own backward is over
            seen = root + timeline.block_visits @ pad if pass_.first else everything
            during = np.where(backward, everything - timeline.block_done @ pad, seen)
            after = np.where(backward, during - pad[block] - root * ends, during)
        held = timeline.rows(during, during, after)
        copies = Layer(
            "gathered_params",
            self.width * held,
            lambda row: f"{self.width} B x {count(int(held[row]))} params gathered",
        )
        buffers = self.flat_buffers(timeline, pass_, pad) if self.degree > 1 else self.casts(timeline, pass_)
        return [copies, *buffers]

    def casts(self, timeline: Timeline, pass_: _Pass) -> list[Layer]:
        """Without shards to gather, each parameter is cast and copied, one after the other."""
        again = self.plan.zero_stage == 3
        if not self.mixed or not (pass_.first or again):
            return []
        block, first = timeline.unit > 0, np.arange(len(timeline.unit)) == 0
        gathers = (block & (again | ~timeline.backward)) | (first & pass_.first)
        excess = self.width * np.where(gathers, self.sizes.cast_excess[timeline.unit], 0)
        return [Layer("temporary", timeline.rows(excess, 0, 0), f"{self.width} B cast of one parameter")]

    def flat_buffers(self, timeline: Timeline, pass_: _Pass, pad: Bytes) -> list[Layer]:
        """All-gather outputs. Forward frees one after the next is there; backward fetches the next block ahead."""
        stage3 = self.plan.zero_stage == 3
        if not stage3 and not pass_.first:
            return []  # still gathered from the first micro-batch
        unit, backward = timeline.unit, timeline.backward
        block = np.where(unit > 0, unit, -1)
        first = np.arange(len(unit)) == 0
        opens = first & (unit == 0)
        mine = np.where(opens & pass_.first, pad[0], pad[block])  # what this segment gathers
        before = (
            timeline.gathered_before
            if pass_.first
            else np.where(timeline.gathered_before, timeline.gathered_before, -1)
        )
        previous = np.where(first, 0, pad[before])
        cast = -(-mine // self.degree) if self.mixed else np.zeros_like(mine)
        # A block begins: its buffer beside the previous one, which is let go after the copies are made.
        start = previous + np.maximum(mine, cast)
        # The model's forward ends with the last block's buffer; what follows it, such as a loss outside, does not see it.
        closing, inside = (unit == 0) & ~opens, self.trace.loss_inside
        start, during = np.where(closing, previous, start), np.where(closing, previous if inside else 0, mine)
        if stage3:
            ahead = pad[timeline.next_block]
            cast = -(-ahead // self.degree) if self.mixed else np.zeros_like(ahead)
            start = np.where(backward, np.where(unit > 0, np.maximum(mine, ahead + cast), 0), start)
            during = np.where(backward, ahead, during)
        else:  # still gathered from forward
            start, during = np.where(backward, 0, start), np.where(backward, 0, during)
        held = timeline.rows(start, during, during)
        if not inside:  # the first block is fetched when the model's output has its gradient, after the loss
            opening = np.argmax(backward) if unit[np.argmax(backward)] == 0 else -1
            held[(timeline.segment == opening) & (timeline.grad == 0)] = 0
        why = f"{self.width} B x "
        return [
            Layer(
                "gathered_params",
                self.width * held,
                lambda row: f"{why}{count(int(held[row]))} params in all-gather buffers",
            )
        ]

    def gradients(self, timeline: Timeline, pass_: _Pass) -> list[Layer]:
        """Full-size gradients until reduced, the reduction's buffers, and the fp32 shards that it leaves."""
        plan, sizes, sums, width = self.plan, self.sizes, self.sums, self.width
        unit, backward = timeline.unit, timeline.backward
        waits = ZERO[plan.zero_stage].grad is PARTIAL  # unreduced sums until the boundary
        mine = np.where(backward, unit, -1)
        ends = np.arange(len(unit)) == len(unit) - 1
        new = np.where((unit > 0) | ends, mine, -1) if pass_.last or not waits else np.full_like(unit, -1)
        done = np.where(backward, timeline.block_done @ sizes.trainable_shard, 0)
        layers = []

        own = self.own_gradients(timeline, waits and not pass_.first)
        if waits and not pass_.first:  # sums go as their unit is reduced
            left = sums.trainable - (timeline.block_done @ sizes.trainable if pass_.last else np.zeros_like(unit))
            left = np.where(backward, left, sums.trainable)
            partial = width * timeline.rows(left, left, left)
            layers.append(Layer("grads", partial, f"{width} B x params, summed over micro-batches before reducing"))
        elif waits and not pass_.last:
            summed = width * (timeline.block_done @ sizes.trainable)
            own = own + np.where(backward, summed, 0)[timeline.segment]
        layers.append(
            Layer("grads", own, f"{width} B full-size gradients of the unit that runs, and outside the blocks")
        )

        reduced = np.full_like(unit, sums.trainable_shard) if not waits and not pass_.first else done
        layers.append(
            Layer(
                "grads",
                FP32 * (timeline.rows(reduced, reduced, reduced) if pass_.last or not waits else 0),
                f"fp32: 4 B x params reduced so far, of {self.per_shard(sums.trainable)}",
            )
        )
        # reducing: the full gradients beside the new flat input; then that beside its output, and the output in fp32
        output = (width + (FP32 if self.mixed else 0)) * sizes.trainable_shard[new]
        full = self.grads_of(timeline, waits and not pass_.first)
        reducing = width * sizes.trainable_padded[new] + np.maximum(0, output - full)
        previous = width * sizes.trainable_padded[timeline.reduced_before] * (pass_.last or not waits)
        buckets = timeline.rows(previous, previous, np.where(new >= 0, reducing, previous))
        layers.append(Layer("buckets", buckets, f"{width} B flat input of the reduction, kept until the next one"))
        if (plan.layout.dp_replicate > 1 or plan.zero_stage == 0) and self.mixed and pass_.last:
            kept = width * timeline.rows(done, done, done)
            layers.append(Layer("buckets", kept, f"{width} B all-reduce buffers, kept until backward ends"))
        return layers

    def own_gradients(self, timeline: Timeline, summed: bool) -> Bytes:
        """By row: full-size gradients of the running unit and of the parts outside the blocks.

        summed: each is added at once to a sum that exists already.
        """
        own, outside = self.whole_gradients(timeline)
        if not summed:
            return own + outside
        width, sizes = self.width, self.sizes
        return one_gradient(timeline, own, outside, width * sizes.largest_by_unit, width * sizes.trainable)

    def whole_gradients(self, timeline: Timeline) -> tuple[Bytes, Bytes]:
        """By row: full-size gradients of the running unit; of the parts outside the blocks while a block runs."""
        own, outside = timeline.grad, timeline.root_grad[timeline.segment]
        if self.plan.layout.tp > 1:
            ratio = self.sizes.ratio
            own = np.ceil(own * ratio[timeline.unit[timeline.segment]]).astype(np.int64)
            outside = np.ceil(outside * ratio[0]).astype(np.int64)
        return own, outside

    def grads_of(self, timeline: Timeline, summed: bool) -> Bytes:
        """By segment: full-size gradients of its unit at its end."""
        if summed:
            found: Bytes = self.width * self.sizes.trainable[timeline.unit]
            return found
        values = np.zeros(timeline.unit.shape, dtype=np.int64)
        ends = timeline.kind == END
        values[timeline.segment[ends]] = self.whole_gradients(timeline)[0][ends]
        return values

    # The optimizer step

    def step(self, activation: Bytes) -> list[Layer]:
        """Gradient shards and the kernel's temporaries. Source: torch/optim/adamw.py."""
        sums, optimizer = self.sums, self.plan.optimizer
        layers = [Layer("activations", int(activation[0]), "inputs and what the loop still holds")]
        if self.plan.offload != "none":
            return layers
        layers.append(Layer("grads", FP32 * sums.trainable_shard, f"fp32: 4 B x {self.per_shard(sums.trainable)}"))
        if optimizer.states and optimizer.kernel != "fused":
            whole = optimizer.kernel == "foreach"
            numel = sums.trainable_shard if whole else 2 * self.sizes.largest_shard
            why = "4 B x all gradients' shards" if whole else "2 x 4 B x the largest shard"
            layers.append(Layer("temporary", FP32 * numel, f"{optimizer.kernel} {optimizer.name}: {why}"))
        return layers
