"""Stages 1 and 2: whole parameters in one flat buffer, masters and states of one partition.

Source: deepspeed/runtime/zero/stage_1_and_2.py of 0.19.8.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from dsplan.planner.memory.deepspeed.beats import Beats
from dsplan.planner.memory.deepspeed.rank import FP32, Rank, norm_of_one, per_element
from dsplan.planner.memory.deepspeed.reducing import CAST, COPY, FULL, PART, Rules, ownership, reduced
from dsplan.planner.memory.replay import Layer
from dsplan.schemas.optimizer import OptimizerSpec
from dsplan.schemas.plan import Plan
from dsplan.schemas.trace import Trace
from dsplan.schemas.units import count, size

ALIGNMENT = 2
"""Elements per rank to which a flat group is padded. Source: stage_1_and_2.py, nccl_start_alignment_factor."""


class Partitioned(Rank):
    def __init__(self, trace: Trace, plan: Plan, stage: int):
        super().__init__(trace, plan, stage)
        unit = ALIGNMENT * self.degree
        self.flat = -(-self.trained // unit) * unit
        self.part = self.flat // self.degree
        self.offloads = plan.offload != "none"
        self.largest = max(self.trained_numels, default=0)
        self.compact = self.summed == FP32 > self.width
        self.order = self._order()
        dealt = tuple(self.numels[place] for place in self.order)
        self.dealt = dealt
        self.owners = ownership(dealt, self.part)
        self.owned = [own for own in self.owners.own if own]
        self.whole = sum(numel for numel, own in zip(dealt, self.owners.own, strict=True) if own)
        """Elements of the parameters that lie in this rank's partition, also where it owns a part of one."""

    def _order(self) -> list[int]:
        """Places of the trained parameters as they lie in the flat group: round_robin_gradients deals them out to ranks."""
        places = [place for place, param in enumerate(self.params) if param.trainable]
        if not self.knobs.round_robin_gradients:
            return places
        return [place for rank in range(self.degree) for place in places[rank :: self.degree]]

    def states(self, optimizer: OptimizerSpec) -> list[Layer]:
        layers = [
            self.buffers(),
            Layer("params", self.width * self.flat, f"{self.width} B x {count(self.trained)} params"),
            self.frozen(),
        ]
        if self.offloads:
            why = f"the largest gradient on its way out: {self.width} B x {count(self.largest)}"
            layers.append(Layer("buckets", self.width * self.largest, why))
            layers.append(self.first_sums(optimizer))
            return layers
        why = f"{'fp32' if self.master == FP32 else '16-bit'} master: {self.master} B x {self.per_rank(self.part)}"
        return [
            *layers,
            Layer("optimizer", self.master * self.part, why),
            self.optimizer_states(optimizer, [self.part]),
            self.first_sums(optimizer),
        ]

    def host_bytes(self, optimizer: OptimizerSpec) -> int:
        """Master, gradient and states, the partition in the compute dtype, a buffer of the largest gradient; sums."""
        if not self.offloads:
            return 0
        states = int(self.optimizer_states(optimizer, [self.part]).bytes)
        waits = self.plan.accumulation > 1 and self.plan.zero_stage == 2 and not self.compact
        summed = self.width * self.whole if waits else 0
        return (
            (2 * self.master + self.width) * self.part
            + states
            + self.width * self.largest
            + summed
            + self.temporary_bytes(optimizer, [self.part])
        )

    def loads(self, optimizer: OptimizerSpec) -> list[list[Layer]]:
        """A zero gradient of the partition; states come with the first step.

        Parameters are flattened on the host where the GPU has no room for them twice. Source: stage_1_and_2.py, flatten_on_accelerator.
        """
        width, flat = self.width, self.flat
        whole = [self.buffers(), Layer("params", width * flat, f"{width} B x {count(flat)} params"), self.frozen()]
        if self.offloads:
            return [self.states(optimizer)]
        master = Layer("optimizer", self.master * self.part, f"master: {self.master} B x {self.per_rank(self.part)}")
        zeros = Layer("grads", self.master * self.part, f"zero gradient: {self.master} B x {self.per_rank(self.part)}")
        return [[*whole, master, zeros]]

    def moving(self, beats: Beats) -> list[Layer]:
        knobs, plan = self.knobs, self.plan
        again, first = plan.accumulation > 1, plan.zero_stage == 1
        waits = first and not self.overlap
        upcast = first and self.summed != self.width  # each gradient is cast as soon as it is whole
        width = self.summed if upcast else self.width
        contiguous = knobs.contiguous_gradients or self.offloads
        kept = self.summed if self.compact else self.width
        rules = Rules(
            bucket=knobs.reduce_bucket_size,
            contiguous=contiguous,
            keeps_others=first,
            clears_late=self.overlap and not contiguous,
            compact=self.compact,
            keeps_own=self.compact and not first and not self.offloads,
            scatters=knobs.reduce_scatter,
            offloads=self.offloads,
            norms=self.offloads,
            one_rank=not knobs.multi_rank_allreduce,
            sent=self.sent,
            widths=(width, 0 if self.offloads and not self.compact else kept),
        )
        slot = {place: index for index, place in enumerate(self.order)}
        order = tuple(slot[place] for place in beats.grad_order if place in slot)
        part = (self.part if self.compact else self.whole) if again and not first else 0
        held = self.trained if again and first else 0
        ways = [rules]
        if self.offloads and again and not first:  # before the last micro-batch nothing is normed, and less let go of
            ways.append(replace(rules, keeps_own=True, norms=False))
        arriving = self.arriving(beats)
        running = np.asarray(self.activations(beats).bytes) + np.asarray(arriving.bytes)
        taken = []
        for way in ways:
            inside, after = reduced(way, self.dealt, order, self.owners, held=held, at_end=waits, part=part)
            columns = [
                self.by_gradient(inside[:, column], after[:, column], before)
                for column, before in ((FULL, held), (PART, part), (COPY, 0), (CAST, 0))
            ]
            total = running + np.asarray(columns).T @ np.array((*way.widths, 1, 1), dtype=np.int64)
            taken.append((int(total.max()), columns))
        full, part_held, copies, cast = max(taken, key=lambda each: each[0])[1]
        layers = [
            arriving,
            per_element("grads", rules.widths[FULL], full, "gradients not reduced yet"),
            per_element("grads", rules.widths[PART], part_held, "gradients of the own partition"),
            Layer("temporary", copies, lambda row: f"copies of what the bucket holds: {size(int(copies[row]))}"),
            Layer("temporary", cast, lambda row: f"a reduced gradient cast: {size(int(cast[row]))}"),
        ]
        if upcast:
            come = np.array([self.dealt[place] for place in order] + [0], dtype=np.int64)
            layers.append(
                per_element("grads", self.width, self.by_gradient(come, 0 * come), "a gradient until it is cast")
            )
        if contiguous:
            doubled = " x 2 (overlap_comm)" if self.overlap else ""
            since = self.by_gradient(
                np.ones(len(order) + 1, np.int64), np.ones(len(order) + 1, np.int64), int(again and first)
            )
            bytes_ = width * knobs.reduce_bucket_size * (2 if self.overlap else 1)
            why = f"reduce bucket: {width} B x {count(knobs.reduce_bucket_size)}{doubled}"
            layers.append(Layer("buckets", bytes_ * since, why))
        return layers

    def taken_over(self) -> list[Layer]:
        """Stage 1 beside fp32 sums: those of other partitions stay until the step, and with them the bucket they lie in.

        Source: stage_1_and_2.py, clear_backward_seen_flag; free_grad_in_param_list.
        """
        knobs = self.knobs
        if self.plan.zero_stage != 1 or self.summed == self.width:
            return []
        others = [numel for numel, own in zip(self.dealt, self.owners.own, strict=True) if not own]
        if not (knobs.contiguous_gradients or self.offloads):
            others = list(self.dealt)
            inside: list[int] = []
        else:
            inside = [numel for numel in others if numel <= knobs.reduce_bucket_size]
        apart = sum(others) - sum(inside)
        buckets = min(2 if self.overlap else 1, -(-sum(inside) // max(1, knobs.reduce_bucket_size)))
        return [
            Layer("grads", self.summed * apart, f"sums of all: {self.summed} B x {count(apart)}"),
            Layer(
                "buckets",
                self.summed * buckets * knobs.reduce_bucket_size,
                f"buckets in which sums lie: {buckets} x {self.summed} B x {count(knobs.reduce_bucket_size)}",
            ),
        ]

    def steps(self, optimizer: OptimizerSpec) -> list[list[Layer]]:
        pieces = self.owned
        between = []
        if self.plan.accumulation > 1 and self.plan.zero_stage == 1:  # a step between two micro-batches does nothing
            width, knobs = self.summed, self.knobs
            kept = Layer(
                "grads", width * self.trained, f"kept between micro-batches: {width} B x {count(self.trained)}"
            )
            bucket = (
                width
                * knobs.reduce_bucket_size
                * (2 if self.overlap else 1)
                * (knobs.contiguous_gradients or self.offloads)
            )
            between = [
                [kept, Layer("buckets", bucket, f"reduce bucket: {width} B x {count(knobs.reduce_bucket_size)}")]
            ]
        summed = Layer("grads", self.summed * self.part, f"own partition: {self.summed} B x {self.per_rank(self.part)}")
        if self.offloads:
            return [[summed, *self.taken_over()] if self.compact else [], *between]
        kernel = self.kernel(optimizer, [self.part])
        high = self.master * self.part
        step = [Layer("grads", high, f"{self.master} B x {self.per_rank(self.part)}"), *kernel]
        if self.compact:
            return [[*self.taken_over(), summed, norm_of_one(pieces)], step, *between]
        held = Layer("grads", self.width * self.whole, f"own partition: {self.width} B x {count(self.whole)}")
        norm = norm_of_one(pieces)
        flat = self.width * self.part if len(pieces) != 1 or pieces[0] != self.part else 0
        copied = Layer("grads", flat, f"the same flattened: {self.width} B x {self.per_rank(self.part)}")
        cast = Layer("grads", high if self.master != self.width else 0, f"in fp32: 4 B x {self.per_rank(self.part)}")
        return [[held, norm], [held, copied, cast], step, *between]
