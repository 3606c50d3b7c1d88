"""What the bundled runtime allocates, and when: FSDP2's shards, gathers and reductions, laid over the trace.

Source: torch 2.13, torch/distributed/fsdp/_fully_shard; runtime/sharding/stages.py for loading, runtime/checkpoints/saving.py for saving.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dsplan.planner.memory.native_passes import Way, divided, passing_peaks
from dsplan.planner.memory.replay import Layer, Timeline, in_flight, items_at, timelines
from dsplan.planner.memory.shards import Shards, part_of, shards
from dsplan.schemas.ledger import Ledger, MemoryItem, Moment
from dsplan.schemas.optimizer import kernel_of, on_shards, state_formula
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
    """Sums over the units of a rank, some by optimizer. Elements where no bytes are said."""

    master_bytes: int
    """With those that are kept as they are stored."""
    whole: int
    stored: int
    stored_bytes: int
    """Of this rank's shard."""
    trainable: int
    trainable_shard: int
    state_bytes: int
    temporaries: int
    """Of the optimizer step, in fp32."""
    loading: Moment
    model_bytes: int
    """The whole model in fp32, on any rank's host."""


_remembered: dict[object, tuple[Trace, _Held]] = {}


class _Rank:
    """One rank of one pipeline stage under one plan."""

    def __init__(self, trace: Trace, plan: Plan, timeline: Timeline | None):
        layout = plan.layout
        self.trace, self.plan, self.timeline = trace, plan, timeline
        self.optimizer = on_shards(plan.optimizer)
        # Of what goes to the host in part no byte is taken off the device: which units go depends on their sizes.
        self.offloads = plan.offload != "none" and plan.knobs.offload_ratio == 1
        self.degree = 1 if plan.zero_stage == 0 else layout.dp_shard * layout.sp
        self.part = part_of(layout.pp, timeline.pp_stage if timeline else 0)
        self.sizes: Shards = shards(trace, layout.tp, self.degree, self.part)
        self.units = timeline.units if timeline else tuple(range(len(trace.units)))
        self.way = Way(
            zero_stage=plan.zero_stage,
            degree=self.degree,
            tp=layout.tp,
            sequence_parallel=plan.sequence_parallel,
            sp=layout.sp,
            accumulation=min(plan.accumulation, 3),
            replicated=layout.dp_replicate > 1 or plan.zero_stage == 0,
            offloads_gradients=self.offloads,
        )
        self.held = self._held()

    def _held(self) -> _Held:
        """Remembered per trace."""
        layout, spec = self.plan.layout, self.optimizer
        key = (id(self.trace), layout.pp, self.part, self.units, layout.tp, self.degree, spec)
        found = _remembered.get(key)
        if found is None or found[0] is not self.trace:
            if len(_remembered) > 10_000:
                _remembered.clear()
            sums, sizes = self.sizes.sums(self.units), self.sizes
            whole = shards(self.trace, 1, 1).sums(tuple(range(len(self.trace.units))))["master_bytes"]
            held = _Held(
                master_bytes=sums["master_bytes"],
                whole=sums["whole"],
                stored=sums["stored"],
                stored_bytes=sums["stored_shard_bytes"],
                trainable=sums["trainable"],
                trainable_shard=sums["trainable_shard"],
                state_bytes=sizes.optimizer_state_bytes(spec, self.units),
                temporaries=sizes.step_temporaries(spec, self.units),
                loading=self.load(sums["whole"]),
                model_bytes=whole + self.trace.buffer_bytes,
            )
            found = _remembered[key] = (self.trace, held)
        return found[1]

    def ledger(self) -> Ledger:
        states = items_at(self.states(), 0)
        resident = sum(item.bytes for item in states)
        moments = [self.held.loading, *self.passes(states), self.step(states)]
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
        """Masters, buffers and optimizer state, as far as they are on the device.

        Whichever of optimizer and parameters is offloaded, both are: FSDP2 keeps one copy of each shard.
        """
        optimizer = self.optimizer
        layers = [Layer("params", self.trace.buffer_bytes, "buffers of the model")]
        if not self.offloads:
            held = self.held
            masters, stored = held.master_bytes - held.stored_bytes, held.stored_bytes
            layers.append(Layer("params", masters, f"fp32 master: 4 B x {self.per_shard(held.whole - held.stored)}"))
            each = stored * self.degree / max(1, held.stored)
            layers.append(
                Layer("params", stored, f"no master, as stored: {each:.3g} B x {self.per_shard(held.stored)}")
            )
        if not self.offloads:
            why = state_formula(optimizer, self.per_shard(self.held.trainable))
            layers.append(Layer("optimizer", self.held.state_bytes, why))
        return layers

    def host_bytes(self) -> int:
        """Offloaded masters, state and gradients, in pinned memory, and what the step over them makes."""
        if self.plan.offload == "none":
            return 0
        held = self.held
        return held.master_bytes + held.state_bytes + FP32 * (held.trainable_shard + held.temporaries)

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
        layers = [Layer("activations", left, "inputs and what the loop still holds")]
        if not self.offloads:
            grads = FP32 * self.held.trainable_shard
            layers.append(Layer("grads", grads, f"fp32: 4 B x {self.per_shard(self.held.trainable)}"))
            made = FP32 * self.held.temporaries
            layers.append(
                Layer("temporary", made, f"{kernel_of(optimizer)} {optimizer.label}: 4 B x {count(made // FP32)}")
            )
        return Moment(phase="step", where="optimizer step", items=(*states, *items_at(layers, 0)))

    # Before and after training

    def load(self, numel: int) -> Moment:
        """Unit by unit becomes fp32 on the device, whole, beside its shard and those of the units before."""
        unsharded = shards(self.trace, self.plan.layout.tp, 1, self.part)
        whole = unsharded.master_bytes
        own = self.sizes.master_bytes
        order = [unit for unit in self.units if unit] + [unit for unit in self.units if not unit]
        made, most, fullest, before = 0, -1, 0, 0
        for unit in order:
            there = made + int(whole[unit]) + int(own[unit])
            if there > most:
                most, fullest, before = there, unit, made
            made += int(own[unit])
        shard_bytes, stored_bytes = int(own[fullest]), int(unsharded.stored_shard_bytes[fullest])
        stored, floats = int(unsharded.stored[fullest]), int(whole[fullest]) - stored_bytes
        sharded = "the unit that is being sharded, whole"
        each = stored_bytes / max(1, stored)
        layers = [
            Layer("params", self.trace.buffer_bytes, "buffers of the model"),
            Layer("params", before + shard_bytes, f"masters made so far, of {self.per_shard(numel)}"),
            Layer("temporary", floats, f"{sharded}: 4 B x {count(floats // FP32)}"),
            Layer("temporary", stored_bytes, f"{sharded}, as stored: {each:.3g} B x {count(stored)}"),
        ]
        where = f"sharding {self.trace.units[fullest].name or 'the parts outside the blocks'}"
        return Moment(phase="load", where=where, items=items_at(layers, 0))

    def load_host_bytes(self) -> int:
        """The whole model in fp32, as the script builds it on every rank; on meta it takes nothing."""
        if self.plan.built == "meta":
            return self.host_bytes()
        return self.held.model_bytes

    def save(self, states: tuple[MemoryItem, ...]) -> Moment | None:
        """Each parameter is gathered in fp32 on its way to rank 0's host; None where nothing is gathered."""
        if not self.plan.knobs.gather_16bit_weights_on_save or self.degree == 1:
            return None
        largest = FP32 * self.sizes.largest
        layer = Layer("gathered_params", largest, f"the largest parameter whole: 4 B x {count(self.sizes.largest)}")
        return Moment(phase="save", where="gathering the model", items=(*states, *items_at([layer], 0)))

    def save_host_bytes(self) -> int:
        """Whole in fp32, and once more in the compute dtype."""
        numel = sum(unit.numel for unit in self.trace.units)
        return (FP32 + PRECISION_BYTES[self.plan.precision]) * numel
