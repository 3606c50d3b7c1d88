"""What the bundled runtime allocates, and when: FSDP2's shards, gathers and reductions, laid over the trace.

Source: torch 2.13, torch/distributed/fsdp/_fully_shard; runtime/sharding/stages.py for loading, runtime/checkpoints/saving.py for saving.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from dsplan.planner.memory.native_passes import Way, divided, passing_peaks
from dsplan.planner.memory.native_widths import native_optimizer, widths
from dsplan.planner.memory.replay import Layer, Timeline, in_flight, items_at, timelines
from dsplan.planner.memory.shards import Counts, Shards, part_of, shards
from dsplan.schemas.ledger import Ledger, MemoryItem, Moment
from dsplan.schemas.offloading import on_host
from dsplan.schemas.optimizer import kernel_of, product, state_formula
from dsplan.schemas.plan import Plan
from dsplan.schemas.trace import Trace
from dsplan.schemas.units import PRECISION_BYTES, count, size

FP32 = 4


def ledgers(trace: Trace, plan: Plan) -> tuple[Ledger, ...]:
    """One ledger per pipeline stage."""
    stages = timelines(trace, plan.layout.pp) or (None,)
    return tuple(_Rank(trace, plan, stage).ledger() for stage in stages)


def ledger(trace: Trace, plan: Plan) -> Ledger:
    """The fullest pipeline stage's. Of equal stages the first has the most micro-batches in flight."""
    stages = [stage for stage in timelines(trace, plan.layout.pp) if stage.like == stage.pp_stage] or (None,)
    books = [_Rank(trace, plan, stage).ledger() for stage in stages]
    return max(books, key=lambda book: book.allocated_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """Sums over some units of a rank, some by optimizer. Elements where no bytes are said."""

    masters: int
    stored: int
    stored_bytes: int
    """Those that have no master, as they are stored: of this rank's shard."""
    whole: int
    trainable: int
    trainable_shard: int
    state_bytes: int
    temporaries: int
    """Of the optimizer step, in the masters' type."""


Made = TypeVar("Made")
_remembered: dict[object, tuple[Trace, Any]] = {}


def _once(trace: Trace, key: tuple[object, ...], make: Callable[[], Made]) -> Made:
    """What `make` gives, remembered per trace and key."""
    whole_key = (id(trace), *key)
    found = _remembered.get(whole_key)
    if found is None or found[0] is not trace:
        if len(_remembered) > 20_000:
            _remembered.clear()
        found = _remembered[whole_key] = (trace, make())
    made: Made = found[1]
    return made


class _Rank:
    """One rank of one pipeline stage under one plan."""

    def __init__(self, trace: Trace, plan: Plan, timeline: Timeline | None):
        layout = plan.layout
        self.trace, self.plan, self.timeline = trace, plan, timeline
        self.optimizer, self.widths = native_optimizer(plan), widths(plan)
        self.type = "fp32" if self.widths.master == FP32 else "bf16"
        self.degree = 1 if plan.zero_stage == 0 else layout.dp_shard * layout.sp
        self.part = part_of(layout.pp, timeline.pp_stage if timeline else 0)
        self.sizes: Shards = shards(trace, layout.tp, self.degree, self.part)
        self.units = timeline.units if timeline else tuple(range(len(trace.units)))
        self.on_host = self._on_host()
        self.way = Way(
            zero_stage=plan.zero_stage,
            degree=self.degree,
            tp=layout.tp,
            sequence_parallel=plan.sequence_parallel,
            sp=layout.sp,
            accumulation=min(plan.accumulation, 3),
            replicated=layout.dp_replicate > 1 or plan.zero_stage == 0,
            widths=self.widths,
            on_host=frozenset(self.on_host),
        )
        self.staying = tuple(unit for unit in self.units if unit not in self.way.on_host)
        self.where = (layout.pp, self.part, self.units, layout.tp, self.degree)
        self.held, self.away = (
            _once(trace, ("held", units, *self.where, self.optimizer), partial(self._held, units))
            for units in (self.staying, self.on_host)
        )

    def _on_host(self) -> tuple[int, ...]:
        """The units whose shards, gradients and states live on the host. FSDP2 keeps one copy of each shard, so that
        optimizer and parameters go together."""
        plan = self.plan
        if plan.offload == "none":
            return ()
        order = tuple(unit for unit in self.units if unit) + tuple(unit for unit in self.units if not unit)
        ratio = plan.knobs.offload_ratio if plan.offload == "optimizer" else 1.0
        goes = on_host([self.trace.units[unit].numel for unit in order], ratio)
        return tuple(unit for unit, away in zip(order, goes, strict=True) if away)

    def _held(self, units: tuple[int, ...]) -> _Held:
        sums, sizes = self.sizes.sums(units), self.sizes
        return _Held(
            masters=sums["shard"] - sums["stored_shard"],
            whole=sums["whole"],
            stored=sums["stored"],
            stored_bytes=sums["stored_shard_bytes"],
            trainable=sums["trainable"],
            trainable_shard=sums["trainable_shard"],
            state_bytes=sizes.optimizer_state_bytes(self.optimizer, units),
            temporaries=self._muon(units)
            if self.optimizer.name == "muon"
            else sizes.step_temporaries(self.optimizer, units),
        )

    def _muon(self, units: tuple[int, ...]) -> int:
        """Each matrix is gathered and orthogonalised whole: four of it (as gathered, normed, and before and after a product)
        and four of its Gram matrix at once; of a square one seven. Beside them this rank's part of the momentum.

        Source: runtime/optimizing/muon.py, of ns_method gram, in fp32.
        """
        most = 0
        for shape in {param.shape for unit in units for param in self.trace.units[unit].params if param.trainable}:
            if len(shape) == 2:
                whole, square = product(shape), min(shape) ** 2
                own = 7 * square if whole == square else 3 * whole + 4 * square
                most = max(most, own + whole + -(-whole // self.degree))
        return most

    def ledger(self) -> Ledger:
        states = items_at(self.states(), 0)
        resident = sum(item.bytes for item in states)
        load = _once(self.trace, ("load", self.on_host, *self.where, self.widths.master), self.load)
        moments = [load, *self.passes(states), self.step(states)]
        saving = self.save(states)
        return Ledger(
            engine="native",
            level="formula",
            moments=(*moments, saving) if saving else tuple(moments),
            resident_bytes=resident,
            host_bytes=self.host_bytes(),
            load_host_bytes=self.load_host_bytes(),
            save_host_bytes=self.save_host_bytes() if saving else 0,
        )

    # What is there all the time

    def states(self) -> list[Layer]:
        """Masters, buffers and optimizer state, as far as they are on the device."""
        held, width = self.held, self.widths.master
        each = held.stored_bytes * self.degree / max(1, held.stored)
        floats = f"{self.type} master: {width} B x {self.per_shard(held.whole - held.stored)}"
        stored = f"no master, as stored: {each:.3g} B x {self.per_shard(held.stored)}"
        return [
            Layer("params", self.trace.buffer_bytes, "buffers of the model"),
            Layer("params", width * held.masters, floats),
            Layer("params", held.stored_bytes, stored),
            Layer("optimizer", held.state_bytes, state_formula(self.optimizer, self.per_shard(held.trainable))),
        ]

    def host_bytes(self) -> int:
        """Offloaded masters, state and gradients, in pinned memory, and what the step over them makes."""
        away, width = self.away, self.widths.master
        return away.stored_bytes + away.state_bytes + width * (away.masters + away.trainable_shard + away.temporaries)

    def per_shard(self, numel: int) -> str:
        return f"{count(numel)} params" + (f" / dp {self.degree}" if self.degree > 1 else "")

    # Forward and backward

    def passes(self, states: tuple[MemoryItem, ...]) -> list[Moment]:
        """The peaks of forward, backward and of an evaluation's forward."""
        if self.timeline is None:
            return []
        timeline, plan = self.timeline, self.plan
        flying = in_flight(plan.layout, timeline.pp_stage, plan.accumulation, plan.schedule, plan.virtual_stages)
        saved, saved_split = timeline.saved_bytes, timeline.saved_split_bytes
        one = saved
        if plan.layout.tp > 1 or plan.layout.sp > 1:
            one = divided(saved, saved_split, self.way)
        waiting = math.ceil((flying - 1) * one) if flying > 1 else 0
        moments = []
        for phase, peak in passing_peaks(self.trace, timeline, self.sizes, self.way).items():
            held, why = peak.activation_bytes, peak.activation_why
            if waiting and phase != "eval":
                held, why = held + waiting, f"{why}, + {float(flying) - 1:g} micro-batches in flight x {size(one)}"
            activations = (MemoryItem(category="activations", bytes=held, why=why),) if held else ()
            moments.append(Moment(phase=phase, where=peak.where, items=(*states, *activations, *peak.items)))
        return moments

    # The optimizer step

    def step(self, states: tuple[MemoryItem, ...]) -> Moment:
        """Gradient shards and the kernel's temporaries."""
        optimizer = self.optimizer
        left = self.timeline.left_bytes if self.timeline is not None else 0
        held, width = self.held, self.widths.master
        made = f"{kernel_of(optimizer)} {optimizer.label}: {width} B x {count(held.temporaries)}"
        layers = [
            Layer("activations", left, "inputs and what the loop still holds"),
            Layer("grads", width * held.trainable_shard, f"{self.type}: {width} B x {self.per_shard(held.trainable)}"),
            Layer("temporary", width * held.temporaries, made),
        ]
        return Moment(phase="step", where="optimizer step", items=(*states, *items_at(layers, 0)))

    # Before and after training

    def load(self) -> Moment:
        """Unit by unit becomes a master on the device, whole, beside its shard and those of the units before."""
        width = self.widths.master
        unsharded = shards(self.trace, self.plan.layout.tp, 1, self.part)
        whole, own = self._master_bytes(unsharded), self._master_bytes(self.sizes)
        order = [unit for unit in self.units if unit] + [unit for unit in self.units if not unit]
        made, most, fullest, before = 0, -1, 0, 0
        for unit in order:
            there = made + int(whole[unit]) + int(own[unit])
            if there > most:
                most, fullest, before = there, unit, made
            made += 0 if unit in self.way.on_host else int(own[unit])
        numel = int(self.sizes.whole[list(self.units)].sum())
        shard_bytes, stored_bytes = int(own[fullest]), int(unsharded.stored_shard_bytes[fullest])
        stored, floats = int(unsharded.stored[fullest]), int(whole[fullest]) - stored_bytes
        sharded = "the unit that is being sharded, whole"
        each = stored_bytes / max(1, stored)
        layers = [
            Layer("params", self.trace.buffer_bytes, "buffers of the model"),
            Layer("params", before + shard_bytes, f"masters made so far, of {self.per_shard(numel)}"),
            Layer("temporary", floats, f"{sharded}: {width} B x {count(floats // width)}"),
            Layer("temporary", stored_bytes, f"{sharded}, as stored: {each:.3g} B x {count(stored)}"),
        ]
        where = f"sharding {self.trace.units[fullest].name or 'the parts outside the blocks'}"
        return Moment(phase="load", where=where, items=items_at(layers, 0))

    def load_host_bytes(self) -> int:
        """The whole model in fp32, as the script builds it on every rank; on meta it takes nothing."""
        if self.plan.built == "meta":
            return self.host_bytes()
        whole = shards(self.trace, 1, 1)
        return _once(self.trace, ("whole",), lambda: int(whole.master_bytes.sum())) + self.trace.buffer_bytes

    def _master_bytes(self, sizes: Shards) -> Counts:
        """By unit: what lies between steps, in the masters' type or as it is stored."""
        return self.widths.master * (sizes.shard - sizes.stored_shard) + sizes.stored_shard_bytes

    def save(self, states: tuple[MemoryItem, ...]) -> Moment | None:
        """Each parameter is gathered in fp32 on its way to rank 0's host; None where nothing is gathered."""
        if not self.plan.knobs.gather_16bit_weights_on_save or self.degree == 1:
            return None
        width, largest = self.widths.master, self.sizes.largest
        layer = Layer("gathered_params", width * largest, f"the largest parameter whole: {width} B x {count(largest)}")
        return Moment(phase="save", where="gathering the model", items=(*states, *items_at([layer], 0)))

    def save_host_bytes(self) -> int:
        """Whole in fp32, and once more in the compute dtype."""
        numel = sum(unit.numel for unit in self.trace.units)
        return (FP32 + PRECISION_BYTES[self.plan.precision]) * numel
