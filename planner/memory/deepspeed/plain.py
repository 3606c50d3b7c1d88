"""Stage 0, and BF16_Optimizer (stage 1 in bf16 with fp32 accumulation): gradients whole to the end of backward.

Source: deepspeed/runtime/{engine,bf16_optimizer,fp16/fused_optimizer,fp16/unfused_optimizer}.py of 0.19.8.
"""

from __future__ import annotations

import numpy as np
from dsplan.planner.memory.deepspeed.beats import Beats, Bytes
from dsplan.planner.memory.deepspeed.rank import FP32, Rank, per_element
from dsplan.planner.memory.replay import Layer
from dsplan.schemas.optimizer import OptimizerSpec, kernel_of
from dsplan.schemas.units import count

ALLREDUCE = 500_000_000
"""Elements gathered before an all-reduce at stage 0. Source: engine.py, buffered_allreduce_fallback."""


class Plain(Rank):
    """Stage 0: everything on every rank; gradients all-reduced after backward in flat copies."""

    def states(self, optimizer: OptimizerSpec) -> list[Layer]:
        layers = [
            self.buffers(),
            Layer("params", self.width * self.trained, f"{self.width} B x {count(self.trained)} params"),
            self.frozen(),
        ]
        if self.mixed:
            layers.append(Layer("optimizer", FP32 * self.trained, f"fp32 master: 4 B x {count(self.trained)} params"))
            layers.append(self.first_sums(optimizer))
        return [
            *layers,
            self.optimizer_states(optimizer, [self.trained] if self.flat(optimizer) else self.trained_numels),
        ]

    def flat(self, optimizer: OptimizerSpec) -> bool:
        """FP16_Optimizer keeps one flat group, under DeepSpeed's fused Adam; FP16_UnfusedOptimizer a tensor for each."""
        return self.mixed and kernel_of(optimizer) == "fused"

    def moving(self, beats: Beats) -> list[Layer]:
        held = self.gradients(beats, self.plan.accumulation > 1)
        layers = [self.arriving(beats), per_element("grads", self.width, held, "gradients up to here, all kept")]
        if self.degree > 1:
            copied = np.zeros_like(held)
            copied[-1] = self.largest_copy()
            sent = self.width if self.sent == self.width else self.width + self.sent
            layers.append(per_element("buckets", sent, copied, "flat copy for the all-reduce"))
        return layers

    def gradients(self, beats: Beats, kept: bool) -> Bytes:
        """By row: elements of whole gradients that nothing takes away; kept: also of earlier micro-batches."""
        sizes = np.array([self.numels[place] for place in beats.grad_order] + [0], dtype=np.int64)
        if kept:
            everything = np.full(len(sizes), self.trained, dtype=np.int64)
            return self.by_gradient(everything + sizes, everything, self.trained)
        after = np.cumsum(sizes)
        return self.by_gradient(after, after)

    def loads(self, optimizer: OptimizerSpec) -> list[list[Layer]]:
        """A step over zero gradients makes the optimizer's states. Source: unfused_optimizer.py, initialize_optimizer_states."""
        held = self.states(optimizer)
        if not self.mixed:
            return [held]
        zeros = Layer("grads", FP32 * self.trained, f"zero gradients: 4 B x {count(self.trained)}")
        numels = [self.trained] if self.flat(optimizer) else self.trained_numels
        return [[*held, zeros, *self.kernel(optimizer, numels)]]

    def largest_copy(self) -> int:
        """Elements of the largest flat copy; a single gradient is reduced where it is."""
        most, run, members = 0, 0, 0
        for numel in self.trained_numels:
            run, members = run + numel, members + 1
            most = max(most, run if members > 1 else 0)
            if run > ALLREDUCE:
                run = members = 0
        return most

    def steps(self, optimizer: OptimizerSpec) -> list[list[Layer]]:
        grads = Layer("grads", self.width * self.trained, f"{self.width} B x {count(self.trained)} gradients")
        numels = [self.trained] if self.flat(optimizer) else self.trained_numels
        if not self.mixed:
            return [[grads, *self.kernel(optimizer, numels)]]
        copies = Layer("grads", FP32 * self.trained, f"fp32 copies: 4 B x {count(self.trained)}")
        if not self.flat(optimizer):
            return [[grads, copies, *self.kernel(optimizer, numels)]]
        again = Layer("temporary", FP32 * self.trained, "the same once more, flattened")
        return [[grads, copies, again], [grads, copies, *self.kernel(optimizer, numels)]]


class Accumulated(Plain):
    """BF16_Optimizer: a flat fp32 gradient of the whole model on every rank, masters and states of one partition."""

    @property
    def part(self) -> int:
        unit = 2 * self.degree
        return -(-self.trained // unit) * unit // self.degree

    def states(self, optimizer: OptimizerSpec) -> list[Layer]:
        flat = self.part * self.degree
        return [
            self.buffers(),
            Layer("params", self.width * flat, f"{self.width} B x {count(self.trained)} params"),
            self.frozen(),
            Layer(
                "grads", self.summed * flat, f"gradients of the whole model: {self.summed} B x {count(self.trained)}"
            ),
            Layer("optimizer", FP32 * self.part, f"fp32 master: 4 B x {self.per_rank(self.part)}"),
            self.first_sums(optimizer),
            self.optimizer_states(optimizer, [self.part]),
        ]

    def loads(self, optimizer: OptimizerSpec) -> list[list[Layer]]:
        return [self.states(optimizer)[:-1]]  # states come with the first step

    def moving(self, beats: Beats) -> list[Layer]:
        held = self.gradients(beats, self.plan.accumulation > 1)
        copied = np.zeros_like(held)
        copied[-1] = self.trained
        layers = [self.arriving(beats), per_element("grads", self.width, held, "gradients up to here, all kept")]
        if self.sent != self.summed and self.degree > 1:
            layers.append(per_element("buckets", self.sent, copied, "copy of the sums for the all-reduce"))
        return layers

    def steps(self, optimizer: OptimizerSpec) -> list[list[Layer]]:
        grads = Layer("grads", self.width * self.trained, f"{self.width} B x {count(self.trained)} gradients")
        return [[grads, *self.kernel(optimizer, [self.part])]]
