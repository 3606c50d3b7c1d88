"""Stage 3: every parameter split over the ranks; the coordinator gathers, keeps and prefetches.

Source: deepspeed/runtime/zero/stage3.py of 0.19.8.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from dsplan.planner.memory.deepspeed.beats import Beats
from dsplan.planner.memory.deepspeed.fetching import FLAT, HELD, SAVED, Limits, gathered, persistent
from dsplan.planner.memory.deepspeed.rank import FP32, Rank, norm_of_one, per_element
from dsplan.planner.memory.deepspeed.saved_weights import saved_weights
from dsplan.planner.memory.deepspeed.scattering import COPY, FULL, PIECES, Scatter, scattered
from dsplan.planner.memory.kept_inputs import as_run
from dsplan.planner.memory.replay import Layer
from dsplan.schemas.optimizer import OptimizerSpec
from dsplan.schemas.plan import Plan
from dsplan.schemas.trace import Trace
from dsplan.schemas.units import count, size


class Gathered(Rank):
    sees_modules = True

    def __init__(self, trace: Trace, plan: Plan, stage: int):
        super().__init__(as_run(trace, plan), plan, stage)
        knobs = plan.knobs
        if knobs.mics_shard_size > 0:
            self.degree = min(self.degree, knobs.mics_shard_size)
        self.limits = Limits(
            prefetch=knobs.prefetch_bucket_size,
            live=knobs.max_live_parameters,
            reuse=knobs.max_reuse_distance,
            persist=knobs.param_persistence_threshold,
            persist_total=knobs.model_persistence_threshold,
        )
        padded = [-(-numel // self.degree) * self.degree for numel in self.numels]
        self.fetches = self.degree > 1 or plan.offload == "param"
        """Whether whole parameters are copies: on one rank they are views of the shard, where it lies on the device.

        Source: partition_parameters.py, NoGatherHandle.
        """
        kept = persistent(self.numels, self.limits) if self.fetches else ()
        self.persistent = sum(padded[param] for param in kept)
        self.pieces = [-(-numel // self.degree) for numel in self.trained_numels]
        self.shard = sum(self.pieces)

    def states(self, optimizer: OptimizerSpec) -> list[Layer]:
        width, knobs, offload = self.width, self.knobs, self.plan.offload
        layers = [self.buffers()]
        if offload != "param":
            layers.append(Layer("params", width * self.shard, f"{width} B x {self.per_rank(self.shard)}"))
            layers.append(self.frozen(self.degree))
        kept = Layer("gathered_params", width * self.persistent, f"persistent: {width} B x {count(self.persistent)}")
        layers.append(kept)
        if knobs.hpz_partition_size > 1:
            second = -(-sum(self.numels) // knobs.hpz_partition_size)
            why = f"second copy in the node: {width} B x {count(second)} (hpz {knobs.hpz_partition_size})"
            layers.append(Layer("params", width * second, why))
        on_device = sum(self.sub_groups()) if offload == "none" else sum(self.on_device())
        if on_device:
            why = f"{'fp32' if self.master == FP32 else '16-bit'} master: {self.master} B x {self.per_rank(on_device)}"
            layers.append(Layer("optimizer", self.master * on_device, why))
            layers.append(
                self.optimizer_states(optimizer, self.sub_groups() if offload == "none" else self.on_device())
            )
        if offload == "none":
            why = f"{self.summed} B x {self.per_rank(self.shard)}"
            layers.append(Layer("grads", self.summed * self.shard, why))
        layers.append(self.first_sums(optimizer))
        if knobs.contiguous_gradients:  # in the dtype that is sent
            why = f"reduce bucket: {self.sent} B x {count(knobs.reduce_bucket_size)}"
            layers.append(Layer("buckets", self.sent * knobs.reduce_bucket_size, why))
        return layers

    def sub_groups(self) -> list[int]:
        """Elements of the optimizer's sub-groups."""
        return [size for size, _ in self.grouped]

    @cached_property
    def grouped(self) -> list[tuple[int, int]]:
        """(elements, parameters) of the sub-groups. Source: stage3.py, _create_fp16_sub_groups."""
        limit = self.knobs.sub_group_size
        if limit >= self.shard:
            return [(self.shard, len(self.pieces))]
        groups, running, members = [], 0, 0
        for piece in self.pieces:
            running, members = running + piece, members + 1
            if running >= limit:
                groups.append((running, members))
                running = members = 0
        return [*groups, (running, members)] if running else groups

    @property
    def checked(self) -> int:
        """Bytes of the check for infinities: a bool an element, in fp16. Source: stage3.py, has_overflow."""
        return self.shard if self.plan.precision == "fp16" else 0

    def on_device(self) -> list[int]:
        """The sub-groups that offload_optimizer.ratio leaves on the GPU: the first ones."""
        groups = self.sub_groups()
        return groups[: int((1 - self.knobs.offload_ratio) * len(groups))]

    def host_bytes(self, optimizer: OptimizerSpec) -> int:
        offload, knobs = self.plan.offload, self.knobs
        if offload == "none":
            return 0
        groups = self.sub_groups()[len(self.on_device()) :]
        states = 2 * self.master * sum(groups) + int(self.optimizer_states(optimizer, groups).bytes)
        if knobs.nvme_optimizer:
            tensors = 2 + optimizer.states
            states = FP32 * knobs.optimizer_buffers * tensors * max(groups, default=0)
        total = (
            states
            + self.summed * self.shard
            + max([self.checked, *(self.temporary_bytes(optimizer, [each]) for each in groups)])
        )
        if offload == "param":
            shards = self.width * self.shard + -(-self.frozen_bytes // self.degree)
            buffers = self.width * knobs.param_buffers * knobs.param_buffer_size
            total += buffers if knobs.nvme_params else shards
        return total

    def loads(self, optimizer: OptimizerSpec) -> list[list[Layer]]:
        """Shards, moved to one flat buffer; then the masters beside a zero gradient of the largest sub-group.

        A model that was not made shard by shard is moved to the device whole before. Source: engine.py,
        _configure_distributed_model.
        """
        if self.plan.built == "meta":
            return self.partitioned(optimizer)
        numel = sum(self.trained_numels)
        why = f"the whole model, before it is split: {self.width} B x {count(numel)}"
        whole = [self.buffers(), Layer("params", self.width * numel, why), self.frozen(1)]
        return [whole, *self.partitioned(optimizer)]

    def partitioned(self, optimizer: OptimizerSpec) -> list[list[Layer]]:
        width, part = self.width, max(self.sub_groups(), default=0)
        shards = [self.buffers(), Layer("params", width * self.shard, f"{width} B x {self.per_rank(self.shard)}")]
        if self.plan.offload == "param":
            return [self.states(optimizer)]
        shards.append(self.frozen(self.degree))
        largest = max(self.numels, default=0)
        most = max(self.shard, largest)
        moving = Layer(
            "params", width * most, f"the same again, or the largest parameter whole: {width} B x {count(most)}"
        )
        if self.plan.offload != "none":
            return [[*shards, moving], self.states(optimizer)]
        master = Layer("optimizer", self.master * self.shard, f"master: {self.master} B x {self.per_rank(self.shard)}")
        zeros = Layer("grads", self.master * part, f"zero gradient: {self.master} B x {count(part)}")
        return [[*shards, moving], [*shards, master, zeros]]

    def save(self) -> Layer | None:
        """Module by module is gathered. Source: engine.py, _zero3_consolidated_16bit_state_dict."""
        if not self.knobs.gather_16bit_weights_on_save or not self.fetches:
            return None
        largest = max(self.numels, default=0)
        return Layer("gathered_params", self.width * largest, f"largest parameter: {self.width} B x {count(largest)}")

    def moving(self, beats: Beats) -> list[Layer]:
        width = self.width
        leaky = not self.knobs.memory_efficient_linear and self.fetches
        saved = saved_weights(self.trace, beats) if leaky else ()
        inside, after = gathered(beats, self.limits, saved, flattens=self.degree > 1)
        layers = []
        before = np.concatenate((np.zeros((1, 3), np.int64), after[:-1]))
        if self.fetches:
            whole = self.rows(before[:, HELD], inside[:, HELD])
            flat = self.rows(before[:, FLAT], inside[:, FLAT])
            layers.append(per_element("gathered_params", width, whole, "params gathered whole"))
            layers.append(per_element("gathered_params", width, flat, "flat buffers that params arrive in"))
            if leaky:
                kept = self.rows(before[:, SAVED], inside[:, SAVED])
                why = "weights that autograd keeps whole (memory_efficient_linear false)"
                layers.append(per_element("gathered_params", width, kept, why))
        rules = Scatter(
            bucket=self.knobs.reduce_bucket_size,
            contiguous=self.knobs.contiguous_gradients,
            scatters=self.knobs.reduce_scatter,
            degree=self.degree,
            computed=width,
            sent=self.sent,
            summed=self.summed,
            master=self.master,
            offloads=self.plan.offload != "none",
        )
        most, left = scattered(rules, tuple(self.numels[place] for place in beats.grad_order), beats.grad_order)
        full, copy, pieces = (self.by_gradient(most[:, column], left[:, column]) for column in (FULL, COPY, PIECES))
        return [
            *layers,
            self.arriving(beats),
            per_element("grads", width, full // width, "gradients not reduced yet"),
            per_element("temporary", self.sent, copy // self.sent, "copies of a bucket, to be sent"),
            Layer("temporary", pieces, lambda row: f"reduced parts on their way: {size(int(pieces[row]))}"),
        ]

    def steps(self, optimizer: OptimizerSpec) -> list[list[Layer]]:
        if self.plan.offload != "none":
            groups = self.on_device()
            return [[Layer("temporary", int(layer.bytes), str(layer.why)) for layer in self.kernel(optimizer, groups)]]
        overflow = Layer("temporary", self.checked, f"check for infinities: 1 B x {self.per_rank(self.shard)}")
        alternatives = [[overflow], [norm_of_one(self.pieces)]]
        for part, members in sorted(set(self.grouped)):
            cast = self.summed != self.master
            copied = members > 1 or cast  # else a view of the gradient serves
            high = Layer("grads", self.master * part * copied, f"one sub-group: {self.master} B x {count(part)}")
            flat = self.summed * part * (members > 1)
            alternatives.append([high, *self.kernel(optimizer, [part])])
            if cast:
                alternatives.append(
                    [high, Layer("grads", flat, f"the same, flattened: {self.summed} B x {count(part)}")]
                )
        return alternatives
