"""What the bundled runtime allocates, and when: FSDP2's shards, gathers and reductions, laid over the trace.

Source: torch 2.13, torch/distributed/fsdp/_fully_shard/{_fsdp_param_group,_fsdp_collectives,_fsdp_param}.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from dsplan.planner.memory.replay import Bytes, Layer, Timeline, activation_layer, items_at, peaks, timelines
from dsplan.planner.memory.shards import Shards, shards
from dsplan.schemas.layout import PARTIAL, ZERO
from dsplan.schemas.ledger import Ledger, Moment
from dsplan.schemas.plan import Plan
from dsplan.schemas.trace import Trace
from dsplan.schemas.units import PRECISION_BYTES, count

FP32 = 4


def ledger(trace: Trace, plan: Plan) -> Ledger:
    """The fullest pipeline stage's ledger."""
    stages = timelines(trace, plan.layout.pp) or (None,)
    books = [_Rank(trace, plan, stage).ledger() for stage in stages]
    return max(books, key=lambda book: book.allocated_bytes)


@dataclass(frozen=True, slots=True)
class _Sums:
    """Elements of all units of this rank."""

    whole: int
    padded: int
    shard: int
    trainable: int
    trainable_shard: int
    tensors: int


class _Rank:
    """One rank of one pipeline stage under one plan."""

    def __init__(self, trace: Trace, plan: Plan, timeline: Timeline | None):
        layout = plan.layout
        self.trace, self.plan, self.timeline = trace, plan, timeline
        self.degree = 1 if plan.zero_stage == 0 else layout.dp_shard
        self.sizes: Shards = shards(trace, layout.tp, self.degree)
        self.units = list(timeline.units) if timeline else list(range(len(trace.units)))
        self.width = PRECISION_BYTES[plan.precision]
        self.mixed = self.width < FP32
        self.accumulating = plan.accumulation > 1
        names = ("whole", "padded", "shard", "trainable", "trainable_shard", "tensors")
        self.sums = _Sums(*(int(getattr(self.sizes, name)[self.units].sum()) for name in names))
        """The compute dtype's bytes; gradients are reduced in it too."""

    def ledger(self) -> Ledger:
        on_device = self.states()
        moments: list[Moment] = []
        if self.timeline is not None:
            moments = peaks(self.timeline, on_device + self.moving(self.timeline))
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

    def moving(self, timeline: Timeline) -> list[Layer]:
        return [
            activation_layer(timeline, self.plan.layout, self.plan.accumulation),
            *self.gathered(timeline),
            *self.gradients(timeline),
        ]

    def gathered(self, timeline: Timeline) -> list[Layer]:
        """Unsharded copies in the compute dtype, and the flat buffers they are copied out of."""
        pad, unit = self.sizes.padded, timeline.unit
        block = np.where(unit > 0, unit, -1)
        root = int(pad[0]) if 0 in timeline.units else 0
        if self.plan.zero_stage == 3:  # a block is dropped after use
            copies_start = copies = root + pad[block]
            copies_end = np.full_like(copies, root)
        elif self.accumulating:  # kept over all micro-batches
            copies_start = copies = copies_end = np.full(unit.shape, self.sums.padded, dtype=np.int64)
        else:  # kept until its own backward is over
            seen, done = timeline.block_visits @ pad, timeline.block_done @ pad
            all_blocks = self.sums.padded - root
            copies = root + np.where(timeline.backward, all_blocks - done, seen)
            copies_start = copies
            copies_end = copies - np.where(timeline.backward, pad[block], 0)
        layers = [
            Layer(
                "gathered_params",
                self.width * timeline.rows(copies_start, copies, copies_end),
                lambda row: f"{self.width} B x {count(self.at(timeline, copies, row))} params gathered",
            )
        ]
        if self.degree > 1 and (self.plan.zero_stage == 3 or not self.accumulating):
            layers.append(self.flat_buffers(timeline, pad))
        return layers

    def flat_buffers(self, timeline: Timeline, pad: Bytes) -> Layer:
        """All-gather outputs. Forward frees one after the next is there; backward fetches the next block ahead."""
        unit, backward = timeline.unit, timeline.backward
        block = np.where(unit > 0, unit, -1)
        first = np.arange(len(unit)) == 0
        mine = np.where(first & (unit == 0), pad[0], pad[block])  # what this segment gathers
        previous = np.where(first, 0, pad[timeline.gathered_before])
        cast = -(-mine // self.degree) if self.mixed else np.zeros_like(mine)
        # A block begins: its buffer beside the previous one, before its copies (which `gathered` counts) are made.
        start = np.where(unit > 0, np.maximum(mine, previous + cast), np.maximum(mine, cast))
        # The model's forward ends with the last block's buffer; what follows, the loss above all, does not see it.
        closing = (unit == 0) & ~first
        start, during = np.where(closing, 0, start), np.where(closing, 0, mine)
        if self.plan.zero_stage == 3:
            ahead = pad[timeline.next_block]
            cast = -(-ahead // self.degree) if self.mixed else np.zeros_like(ahead)
            start = np.where(backward, np.where(unit > 0, np.maximum(mine, ahead + cast), 0), start)
            during = np.where(backward, ahead, during)
        else:  # still gathered from forward
            start, during = np.where(backward, 0, start), np.where(backward, 0, during)
        held = timeline.rows(start, during, during)
        # Backward begins with the loss. The first block is fetched when the model's output has its gradient.
        opening = np.argmax(backward) if unit[np.argmax(backward)] == 0 else -1
        held[(timeline.segment == opening) & (timeline.grad == 0)] = 0
        return Layer(
            "gathered_params",
            self.width * held,
            lambda row: f"{self.width} B x {count(int(held[row]))} params in all-gather buffers",
        )

    def gradients(self, timeline: Timeline) -> list[Layer]:
        """Full-size gradients until reduced, the reduction's buffers, and the fp32 shards that it leaves."""
        plan, sizes = self.plan, self.sizes
        unit, backward = timeline.unit, timeline.backward
        mine = np.where(backward, unit, -1)
        last = np.zeros(unit.shape, dtype=bool)
        last[-1] = True
        reduces = backward & ((unit > 0) | last)  # what lies outside the blocks is reduced at the very end
        waits = ZERO[plan.zero_stage].grad is PARTIAL and self.accumulating
        full, shard = sizes.trainable_padded, sizes.trainable_shard
        done = timeline.block_done @ shard
        layers = []
        own = self.own_gradients(timeline)
        layers.append(Layer("grads", own, f"{self.width} B full-size gradients that are not reduced yet"))
        if waits:  # unsharded sums of earlier micro-batches
            layers.append(
                Layer(
                    "grads",
                    self.width * self.sums.trainable,
                    f"{self.width} B x {count(self.sums.trainable)} params, summed over micro-batches before reducing",
                )
            )
            return layers
        if self.accumulating:  # fp32 shards of earlier micro-batches, one more unit's beside them
            held = np.full(unit.shape, self.sums.trainable_shard, dtype=np.int64)
            new = np.where(reduces, shard[mine], 0)
        else:
            held = np.where(backward, done, 0)
            new = np.where(reduces, shard[mine], 0)
        layers.append(
            Layer(
                "grads",
                FP32 * timeline.rows(held, held, held),
                f"fp32 shards: 4 B x {self.per_shard(self.sums.trainable)}, those that are reduced",
            )
        )
        flat = np.where(reduces, full[mine], 0)
        previous = full[timeline.reduced_before]
        # reducing: full gradients (in `own`) beside the new input; or the input beside its output, and that in fp32
        output = self.width * new + (FP32 * new if self.mixed else 0)
        freed = self.grad_bytes_at_end(timeline)
        reducing = self.width * flat + np.maximum(0, output - freed)
        waiting = self.width * previous
        buckets = timeline.rows(waiting, waiting, np.where(reduces, reducing, waiting))
        layers.append(Layer("buckets", buckets, f"{self.width} B flat input of the reduction, kept until the next one"))
        if (plan.layout.dp_replicate > 1 or plan.zero_stage == 0) and self.mixed:
            summed = np.where(backward, done, 0)
            kept = self.width * timeline.rows(summed, summed, summed)
            layers.append(Layer("buckets", kept, f"{self.width} B all-reduce buffers, kept until backward ends"))
        return layers

    def own_gradients(self, timeline: Timeline) -> Bytes:
        """By row: full-size gradients of the running unit and of the parts outside the blocks."""
        ratio = self.tp_ratio()
        unit = timeline.unit[timeline.segment]
        own = timeline.grad * ratio[unit]
        return np.ceil(own + timeline.root_grad[timeline.segment] * ratio[0]).astype(np.int64)

    def grad_bytes_at_end(self, timeline: Timeline) -> Bytes:
        """By segment: full-size gradients of its unit at its end."""
        ends = timeline.kind == 2
        values = np.zeros(timeline.unit.shape, dtype=np.int64)
        values[timeline.segment[ends]] = (timeline.grad * self.tp_ratio()[timeline.unit[timeline.segment]])[ends]
        return values

    def tp_ratio(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """By unit: the part of its parameters that one tp rank holds."""
        whole = shards(self.trace, 1, 1).whole
        return np.divide(self.sizes.whole, whole, out=np.ones(whole.shape), where=whole > 0)

    @staticmethod
    def at(timeline: Timeline, values: Bytes, row: int) -> int:
        return int(values[timeline.segment[row]])

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
