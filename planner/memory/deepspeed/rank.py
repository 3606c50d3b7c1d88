"""One rank of one pipeline stage under DeepSpeed: what all ZeRO stages share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache

import numpy as np
from dsplan.planner.memory.deepspeed.beats import Beats, Bytes, Split, beats_of, stage_params
from dsplan.planner.memory.replay import Layer, in_flight, items_at, timelines
from dsplan.planner.memory.shards import local_numel
from dsplan.schemas.ledger import Category, Ledger, Moment, Phase
from dsplan.schemas.optimizer import (
    OptimizerSpec,
    kernel_of,
    state_bytes,
    state_formula,
    step_temporary_elements,
)
from dsplan.schemas.plan import Plan
from dsplan.schemas.trace import Param, Trace
from dsplan.schemas.units import PRECISION_BYTES, count, size

FP32 = 4
FP64 = 8
"""Bytes of an element in gradient norms. Source: deepspeed/runtime/zero/utils.py, get_norm_dtype."""


class Rank:
    """What does not depend on the optimizer, so that one rank serves many plans.

    Elements: numel of all parameters here, trained of those with gradients. Rows: the beats and their marks in turn.
    """

    sees_modules = False

    def __init__(self, trace: Trace, plan: Plan, stage: int):
        layout = plan.layout
        self.trace, self.plan, self.stage, self.knobs = trace, plan, stage, plan.knobs
        self.books: dict[OptimizerSpec, Ledger] = {}
        split = Split(layout.pp, layout.tp, plan.sequence_parallel, layout.sp)
        first = self.sees_modules and plan.knobs.memory_efficient_linear
        self.beats = beats_of(trace, split, stage, modules=self.sees_modules, weights_first=first)
        self.params: Sequence[Param] = self.beats.params if self.beats else stage_params(trace, layout.pp, stage)
        self.numels: Sequence[int] = (
            self.beats.numels if self.beats else [local_numel(param, layout.tp) for param in self.params]
        )
        self.degree = layout.dp * layout.sp
        self.width = PRECISION_BYTES[plan.precision]
        self.mixed = self.width < FP32
        self.summed = PRECISION_BYTES[plan.knobs.grad_accum_dtype or plan.precision]
        self.sent = FP32 if layout.sp > 1 else PRECISION_BYTES[plan.knobs.communication_dtype or plan.precision]
        low = plan.knobs.low_precision_masters
        self.master = self.width if low else FP32
        self.state = self.width if low and plan.knobs.low_precision_states else FP32
        self.trained_numels = [numel for param, numel in zip(self.params, self.numels, strict=True) if param.trainable]
        self.trained = sum(self.trained_numels)
        self.frozen_bytes = sum(
            param.dtype_bytes * numel
            if param.stored_bytes is None
            else -(-param.stored_bytes * numel // max(1, param.numel))
            for param, numel in zip(self.params, self.numels, strict=True)
            if not param.trainable
        )
        self.model_numel = sum(unit.numel for unit in trace.units)
        overlap = plan.knobs.overlap_comm
        self.overlap = plan.zero_stage == 3 if overlap is None else overlap and layout.pp == 1

    def ledger(self, optimizer: OptimizerSpec) -> Ledger:
        """The rank's ledger under that optimizer, remembered."""
        if optimizer not in self.books:
            self.books[optimizer] = self._ledger(optimizer)
        return self.books[optimizer]

    def _ledger(self, optimizer: OptimizerSpec) -> Ledger:
        held = self.states(optimizer)
        states = items_at(held, 0)
        moments = [Moment(phase="load", where="initialize", items=items_at(_fullest(self.loads(optimizer)), 0))]
        moments += [replace(moment, items=(*states, *moment.items)) for moment in self.passes]
        left = timelines(self.trace, self.plan.layout.pp)[self.stage].left_bytes if self.beats else 0
        loop = Layer("activations", left, "inputs and what the loop still holds")
        stepping = [
            layer for layer in held if layer.category != "gathered_params"
        ]  # let go of, and gathered at its end
        at_work = [[*stepping, loop, *layers] for layers in self.steps(optimizer)]
        step = items_at(_fullest([*at_work, [*held, loop]]), 0)
        moments.append(Moment(phase="step", where="optimizer step", items=step))
        saving = self.save()
        if saving is not None:
            moments.append(Moment(phase="save", where="gathering the model", items=(*states, *items_at([saving], 0))))
        return Ledger(
            engine="deepspeed",
            level="formula",
            moments=tuple(moments),
            resident_bytes=sum(item.bytes for item in states),
            host_bytes=self.host_bytes(optimizer),
            load_host_bytes=self.load_host_bytes(optimizer),
            save_host_bytes=self.width * self.model_numel if saving else 0,
        )

    def states(self, optimizer: OptimizerSpec) -> list[Layer]:
        raise NotImplementedError

    def moving(self, beats: Beats) -> list[Layer]:
        raise NotImplementedError

    def steps(self, optimizer: OptimizerSpec) -> list[list[Layer]]:
        """Alternatives for the fullest moment of the step, each as what it holds beside the states."""
        raise NotImplementedError

    def loads(self, optimizer: OptimizerSpec) -> list[list[Layer]]:
        """Alternatives for the fullest moment of initialize, each as all that it holds."""
        raise NotImplementedError

    def save(self) -> Layer | None:
        """What is gathered to be saved; None: nothing."""
        return None

    def host_bytes(self, optimizer: OptimizerSpec) -> int:
        return 0

    def load_host_bytes(self, optimizer: OptimizerSpec) -> int:
        """The whole model in fp32, as the script builds it on every rank; on meta it takes nothing."""
        offloaded = self.host_bytes(optimizer)
        if self.plan.built == "meta":
            return offloaded
        whole = FP32 * self.model_numel + self.trace.buffer_bytes
        return max(whole, offloaded + whole if self.plan.offload == "param" else offloaded)

    @cached_property
    def passes(self) -> list[Moment]:
        """The fullest moments of forward, backward and evaluation, without the states."""
        beats = self.beats
        if beats is None:
            return []
        moving = self.moving(beats)
        moments = self.moments(beats, [self.activations(beats), *moving])
        alone = timelines(self.trace, self.plan.layout.pp)[self.stage].alone
        most = Layer("activations", int(alone.max(initial=0)), "at most: forward without saved tensors")
        forward = next((moment for moment in moments if moment.phase == "forward"), None)
        gathered = [item for item in forward.items if item.category == "gathered_params"] if forward else []
        evaluation = (*items_at([most], 0), *gathered)
        return [*moments, Moment(phase="eval", where="forward without saved tensors", items=evaluation)]

    # Rows

    def rows(self, during: Bytes | int, at_mark: Bytes | int) -> Bytes:
        assert self.beats is not None
        found = np.empty((len(self.beats.marks), 2), dtype=np.int64)
        found[:, 0], found[:, 1] = during, at_mark
        return found.reshape(-1)

    def by_gradient(self, inside: Bytes, after: Bytes, before: int = 0) -> Bytes:
        """Rows from values by gradient (and one more for the end): inside is that of its mark, after of what follows."""
        assert self.beats is not None
        is_grad = self.beats.is_grad
        done = np.cumsum(is_grad)
        held = np.concatenate(([before], after))
        during = held[done - is_grad]
        at_mark = np.where(is_grad, inside[np.maximum(done - 1, 0)], during)
        at_mark[-1] = inside[-1]
        return self.rows(during, at_mark)

    def activations(self, beats: Beats) -> Layer:
        """Of the running micro-batch, and of those that wait in the pipeline."""
        plan, layout = self.plan, self.plan.layout
        flying = in_flight(layout, self.stage, plan.accumulation, plan.schedule, plan.virtual_stages)
        waiting = math.ceil((flying - 1) * beats.saved_activation) if flying > 1 else 0
        traced = self.rows(beats.full_activation, beats.mark_activation)

        def why(row: int) -> str:
            text = f"traced {size(int(traced[row]))}" + (f" (tp {layout.tp})" if layout.tp > 1 else "")
            more = f", + {float(flying) - 1:g} micro-batches in flight x {size(beats.saved_activation)}"
            return text + (more if waiting else "")

        return Layer("activations", traced + waiting, why)

    def arriving(self, beats: Beats) -> Layer:
        """Gradients that autograd still holds: of one operator, or parts that wait to be summed."""
        held = self.rows(beats.full_grad, beats.mark_grad)
        return Layer("grads", held, f"{self.width} B x gradients that autograd has just made")

    def moments(self, beats: Beats, layers: list[Layer]) -> list[Moment]:
        """The fullest row of forward and of backward."""
        total = np.zeros(2 * len(beats.marks), dtype=np.int64)
        for layer in layers:
            total += layer.bytes
        backward = np.repeat(beats.backward, 2)
        made = []
        phases: tuple[tuple[Phase, NDArrayBool], ...] = (("forward", ~backward), ("backward", backward))
        for phase, mask in phases:
            if mask.any():
                row = int(np.argmax(np.where(mask, total, -1)))
                where = f"{phase} of {beats.names[row // 2] or 'the parts outside the blocks'}"
                made.append(Moment(phase=phase, where=where, items=items_at(layers, row)))
        return made

    # Parts of several stages

    def buffers(self) -> Layer:
        return Layer("params", self.trace.buffer_bytes, "buffers of the model")

    def frozen(self, degree: int = 1) -> Layer:
        divided = f" / dp {degree}" if degree > 1 else ""
        return Layer("params", -(-self.frozen_bytes // degree), f"frozen: {size(self.frozen_bytes)}{divided}")

    def optimizer_states(self, optimizer: OptimizerSpec, numels: Sequence[int]) -> Layer:
        """States of flat tensors of these sizes."""
        total = sum(numels)
        held = _flat_states(optimizer, tuple(numels))
        if self.state < FP32 and optimizer.state_dtype == "fp32":
            held -= (FP32 - self.state) * optimizer.states * total
        why = state_formula(optimizer, self.per_rank(total), self.state if optimizer.state_dtype == "fp32" else None)
        return Layer("optimizer", held, why)

    def first_sums(self, optimizer: OptimizerSpec) -> Layer:
        """Adagrad's constructor makes sums of whole parameters, which the engine keeps beside those of the partition.

        Source: torch/optim/adagrad.py, __init__; stage_1_and_2.py, initialize_optimizer_states. A client makes it in fp32.
        """
        width = (self.width if optimizer.kernel == "fused" else FP32) if optimizer.name == "adagrad" else 0
        if optimizer.kernel == "fused" and self.plan.offload != "none":
            width = 0  # DeepSpeed's own for the host has none
        return Layer("optimizer", width * self.trained, f"adagrad's first sums: {width} B x {count(self.trained)}")

    def temporary_bytes(self, optimizer: OptimizerSpec, numels: Sequence[int]) -> int:
        return self.master * step_temporary_elements(optimizer, numels)

    def kernel(self, optimizer: OptimizerSpec, numels: Sequence[int]) -> list[Layer]:
        """Temporaries of the optimizer over flat tensors of these sizes."""
        elements = step_temporary_elements(optimizer, numels)
        name = kernel_of(optimizer)
        width = self.master
        return [Layer("temporary", width * elements, f"{name} {optimizer.label}: {width} B x {count(elements)}")]

    def per_rank(self, numel: int) -> str:
        return f"{count(numel)} elements of this rank" + (f" (dp {self.degree})" if self.degree > 1 else "")


NDArrayBool = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
Why = Callable[[int], str]


@lru_cache(maxsize=512)
def _flat_states(optimizer: OptimizerSpec, numels: tuple[int, ...]) -> int:
    """Bytes of the states of tensors of one dim."""
    return state_bytes(optimizer, [(numel,) for numel in numels])


def _fullest(alternatives: list[list[Layer]]) -> list[Layer]:
    return max(alternatives, key=lambda layers: sum(int(layer.bytes) for layer in layers))


def norm_of_one(numels: Sequence[int]) -> Layer:
    """Gradients are squared in fp64, one after the other."""
    largest = max(numels, default=0)
    return Layer("temporary", FP64 * largest, f"norm of one gradient in fp64: {FP64} B x {count(largest)}")


def per_element(category: Category, width: int, elements: Bytes, what: str) -> Layer:
    """A layer of so many bytes an element, whose reason gives the number of the row."""
    return Layer(category, width * elements, lambda row: f"{what}: {width} B x {count(int(elements[row]))}")
