"""What one forward and backward of a model does, independent of engine, ZeRO stage and cluster."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

TracePhase = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """One parameter as the model holds it. Tied parameters appear once, under their first name."""

    name: str
    shape: tuple[int, ...]
    dtype_bytes: int
    trainable: bool
    tp_dim: int | None = None
    """The dim that tensor parallelism splits; None: replicated over tp."""
    stored_bytes: int | None = None
    """Bytes of a quantised weight, which has them whatever the precision, and no master copy: it is frozen. None: elements x
    dtype_bytes. What it takes beside them (the scales of its blocks) is in `Trace.buffer_bytes`: no engine shards those."""

    @property
    def numel(self) -> int:
        product = 1
        for length in self.shape:
            product *= length
        return product

    @property
    def held_bytes(self) -> int:
        """Of the whole parameter, as the model holds it."""
        return self.numel * self.dtype_bytes if self.stored_bytes is None else self.stored_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """What is gathered, sharded and recomputed together: one repeated block, or all that lies outside the blocks.

    The unit outside the blocks has the name "" and is always `Trace.units[0]`.
    """

    name: str
    params: tuple[Param, ...]
    forward_flops: float
    """Per forward of one micro-batch (2 x multiply-adds)."""

    @property
    def numel(self) -> int:
        return sum(param.numel for param in self.params)

    @property
    def trainable_numel(self) -> int:
        return sum(param.numel for param in self.params if param.trainable)


@dataclass(frozen=True, slots=True)
class Point:
    """One candidate for the peak inside a segment.

    activation_bytes: everything live that is neither parameter, buffer, gradient of a parameter nor state (inputs count).
    split_bytes: the part of it that tensor parallelism divides.
    grad_bytes: full-size gradients of the segment's own unit that exist at that moment, in the compute dtype.
    """

    activation_bytes: int
    split_bytes: int
    grad_bytes: int


ACTIVATION, SPLIT_ACTIVATION, READ = -1, -2, -3
"""Labels of storages: SPLIT_ACTIVATION is what tensor parallelism divides. 0 and up: the gradient of that parameter.

READ: no bytes, a mark. A linear with a frozen weight reads the storage of the event that follows the mark's first one (of 0
bytes too), and if it kept that for its backward, would let go of it at the mark's second event.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """Every storage that forward and backward make and free, in time order. What the model holds is not among them.

    The first events are the inputs, made before the first segment. Sequences of integers, of compact form in memory.
    """

    storage: Sequence[int]
    """By event: which one, numbered from 0."""
    delta_bytes: Sequence[int]
    """By event: made or grown (+), freed or shrunk (-). 0: the gradient of that parameter is whole, and lies in that storage;
    or what READ says."""
    module: Sequence[int]
    """By event: the module that ran, an index of `modules`."""
    label: Sequence[int]
    """By storage: ACTIVATION, SPLIT_ACTIVATION, READ, or the index in `Trace.all_params` whose gradient it is."""
    modules: tuple[str, ...] = ("",)
    """Names of modules; the first is the model itself, or the loss around it."""

    def __len__(self) -> int:
        return len(self.storage)

    @staticmethod
    def of(
        storage: Sequence[int],
        delta_bytes: Sequence[int],
        module: Sequence[int],
        label: Sequence[int],
        modules: Sequence[str],
    ) -> Events:
        return Events(
            storage=array("q", storage),
            delta_bytes=array("q", delta_bytes),
            module=array("q", module),
            label=array("q", label),
            modules=tuple(modules),
        )


NO_EVENTS = Events.of((), (), (), (), ("",))


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A stretch of the timeline in which one unit runs. Segments follow each other in time without gaps.

    `points` holds only the maxima that none of the others exceeds in both activation_bytes and grad_bytes.
    """

    unit: int
    phase: TracePhase
    start: Point
    end: Point
    points: tuple[Point, ...]
    first_event: int = field(default=0, compare=False)
    """Index in `Trace.events`; the last one is before that of the next segment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The recorded step of one model at one compute dtype, micro_batch and recompute policy.

    Without a sample batch `segments` is empty, and forward_flops and seq_len are None: state bytes only.
    """

    source: str
    units: tuple[Unit, ...]
    buffer_bytes: int
    precision: str
    recompute: str
    micro_batch: int | None
    seq_len: int | None
    segments: tuple[Segment, ...]
    forward_flops: float | None
    flops_source: str | None
    backward_flops: float | None = None
    """Of one backward, without what it computes again. As torch's counter sees it on the traced step: gradients of frozen
    weights are not made, and fused attention makes its scores again."""
    recompute_flops: float | None = None
    """What backward computes again of forward."""
    tp_limit: int = 1
    """The largest tensor-parallel degree that the model's structure allows: tp must divide it. 1: cannot be split."""
    no_tp_rule: str = ""
    """What a rule for splitting the model was looked for by, and not found."""
    loss_inside: bool = False
    """The model's own forward computes the loss (as Hugging Face's do), not the loop around it."""
    notes: tuple[str, ...] = ()
    events: Events = NO_EVENTS

    @property
    def all_params(self) -> tuple[Param, ...]:
        """Of all units, in their order: what labels of gradients count through."""
        return tuple(param for unit in self.units for param in unit.params)

    @property
    def params(self) -> int:
        return sum(unit.numel for unit in self.units)

    @property
    def trainable_params(self) -> int:
        return sum(unit.trainable_numel for unit in self.units)

    @property
    def blocks(self) -> tuple[Unit, ...]:
        return self.units[1:]

    def to_json(self) -> dict[str, Any]:
        events = {name: list(getattr(self.events, name)) for name in Events.__slots__}
        return {**asdict(replace(self, events=NO_EVENTS)), "events": events}

    @staticmethod
    def from_json(value: dict[str, Any]) -> Trace:
        def unit(raw: dict[str, Any]) -> Unit:
            params = tuple(Param(**{**param, "shape": tuple(param["shape"])}) for param in raw["params"])
            return Unit(**{**raw, "params": params})

        def segment(raw: dict[str, Any]) -> Segment:
            points = tuple(Point(**point) for point in raw["points"])
            return Segment(**{**raw, "start": Point(**raw["start"]), "end": Point(**raw["end"]), "points": points})

        return Trace(
            **{
                **value,
                "units": tuple(map(unit, value["units"])),
                "segments": tuple(map(segment, value["segments"])),
                "notes": tuple(value["notes"]),
                "events": Events.of(**value["events"]),
            }
        )
