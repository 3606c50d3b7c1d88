"""What estimate answers beside its table: how far a value reaches, what the lengths of a file take, why the verdict is so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dsplan.schemas.plan import Plan

Asked = Literal["max micro-batch", "max seq-len", "min gpus"]
ASKED: tuple[Asked, ...] = ("max micro-batch", "max seq-len", "min gpus")


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """What to answer beside the table."""

    most: tuple[Literal["micro-batch", "seq-len"], ...] = ()
    fewest_gpus: bool = False
    lengths: str | None = None
    """A file with a sequence length a line."""
    per_rank: bool = False
    timeline: str | None = None
    """A file to write the first row's timeline to."""
    explain: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One value that was tried, and what it takes on the fullest GPU. Bytes are None where the model refused the value."""

    value: int
    fits: bool
    verdict: str
    """A row's, or "refused"."""
    why: str
    """Why it does not fit, with the numbers; empty where it does."""
    allocated_bytes: int | None = None
    device_bytes: int | None = None
    device_bytes_low: int | None = None
    device_bytes_high: int | None = None
    host_bytes: int | None = None
    room_bytes: int | None = None
    """What is left of the GPU; below 0: what is missing."""
    global_batch: int | None = None

    @property
    def sure(self) -> bool:
        """Also by the upper bound of its span."""
        return self.verdict == "fits"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """How far one value of a plan goes: the last that fits, and the next, which does not."""

    asked: Asked
    plan: Plan
    usable_bytes: int
    answer: Probe | None
    """None: even the smallest does not fit."""
    next: Probe | None
    """The neighbour of the answer that fails. None where none was tried: a limit stopped the search."""
    stopped_by: str
    """Why the answer goes no further, for people."""
    sure_value: int | None = None
    """The last value that fits by the upper bound of its span too."""
    exact: bool = True
    """False: larger values were not asked for, to spare traces."""
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "question": self.asked,
            "row": plan_key(self.plan),
            "usable_bytes": self.usable_bytes,
            "answer": asdict(self.answer) if self.answer else None,
            "sure_value": self.sure_value,
            "next": asdict(self.next) if self.next else None,
            "stopped_by": self.stopped_by,
            "exact": self.exact,
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthsAnswer:
    """What batches of these lengths take: the worst one, and how many steps go over the limit."""

    source: str
    samples: int
    longest: int
    plan: Plan
    worst: Probe
    """value: the length that the worst batch is padded to."""
    worst_first_line: int
    worst_last_line: int
    limit_length: int | None
    """The longest batch of the file that fits; None: none does, or no kind of GPU is known."""
    micro_batches: int
    micro_batches_over: int | None
    steps: int
    steps_over: int | None
    """None: no kind of GPU is known."""
    traced_lengths: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        value = asdict(self)
        return {**value, "plan": plan_key(self.plan), "traced_lengths": list(self.traced_lengths)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of the plan, evaluated."""

    what: str
    costs: str
    """What it takes in return."""
    device_bytes: int
    device_bytes_high: int
    verdict: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeItem:
    category: str
    bytes: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a row's verdict is what it is, what is left, and what would change it."""

    plan: Plan
    own: bool
    verdict: str
    phase: str
    where: str
    phases: tuple[tuple[str, int], ...]
    """(phase, allocated bytes at its peak)"""
    largest: tuple[LargeItem, ...]
    usable_bytes: int | None
    room_bytes: int | None
    """Of the GPU; below 0: what is missing."""
    host_phases: tuple[tuple[str, int], ...]
    """(load, train or save, bytes of host memory on a node)"""
    host_room_bytes: int | None
    """Of a node at the fullest of them; None where its memory is not known."""
    reach: tuple[Reach, ...]
    """How far micro_batch and sequence length go."""
    changes: tuple[Change, ...]
    """Where it does not fit: the smallest changes that make it fit, the smallest first."""
    no_change: str | None = None
    """Why there are fewer than three changes, or none."""

    def to_json(self) -> dict[str, Any]:
        return {
            "row": plan_key(self.plan),
            "own": self.own,
            "verdict": self.verdict,
            "phase": self.phase,
            "where": self.where,
            "phases": [{"phase": phase, "allocated_bytes": held} for phase, held in self.phases],
            "largest": [asdict(item) for item in self.largest],
            "usable_bytes": self.usable_bytes,
            "room_bytes": self.room_bytes,
            "host_phases": [{"phase": phase, "bytes": held} for phase, held in self.host_phases],
            "host_room_bytes": self.host_room_bytes,
            "reach": [reach.to_json() for reach in self.reach],
            "changes": [asdict(change) for change in self.changes],
            "no_change": self.no_change,
        }


def plan_key(plan: Plan) -> dict[str, Any]:
    """What tells one row from another."""
    layout = plan.layout
    return {
        "engine": plan.engine,
        "zero_stage": plan.zero_stage,
        "precision": plan.precision,
        "dp": layout.dp,
        "dp_replicate": layout.dp_replicate,
        "tp": layout.tp,
        "pp": layout.pp,
        "sp": layout.sp,
        "micro_batch": plan.micro_batch,
        "accumulation": plan.accumulation,
        "seq_len": plan.seq_len,
        "recompute": plan.recompute,
        "offload": plan.offload,
    }


def any_answer(reaches: Sequence[Reach]) -> bool:
    """Whether each question has an answer in some row."""
    questions = {reach.asked for reach in reaches}
    return all(any(reach.answer for reach in reaches if reach.asked == asked) for asked in questions)
