"""Who holds how many bytes on one rank, when, and why. Formula, rehearsal and measurement all fill this one type."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal["formula", "rehearsal", "measurement"]
Phase = Literal["load", "forward", "backward", "step", "eval", "save"]
Category = Literal["params", "grads", "optimizer", "activations", "gathered_params", "buckets", "temporary"]

PHASES: tuple[Phase, ...] = ("load", "forward", "backward", "step", "eval", "save")
STEP_PHASES: tuple[Phase, ...] = ("forward", "backward", "step")
"""What one optimizer step consists of: all that rehearsal and measurement see."""
CATEGORIES: tuple[Category, ...] = (
    "params",
    "grads",
    "optimizer",
    "activations",
    "gathered_params",
    "buckets",
    "temporary",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryItem:
    """One line of the ledger."""

    category: Category
    bytes: int
    """Per GPU, never a float."""
    why: str
    """The formula with its numbers in it: "4 B x 1.3e9 params / dp 8 (master)"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """All that is live at the peak of one phase."""

    phase: Phase
    where: str
    """For people: "backward of blocks.11"."""
    items: tuple[MemoryItem, ...]

    @property
    def allocated_bytes(self) -> int:
        return sum(item.bytes for item in self.items)

    def category_bytes(self, category: Category) -> int:
        return sum(item.bytes for item in self.items if item.category == category)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """Collectives of one kind in one optimizer step, as one rank sees them. payload_bytes: the full tensor, summed."""

    kind: str
    count: int
    payload_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The peaks of one rank over one optimizer step, and what is resident between steps."""

    engine: Literal["native", "deepspeed"]
    level: Level
    moments: tuple[Moment, ...]
    resident_bytes: int
    host_bytes: int = 0
    """Host memory that holds states or parameters (offload), of this rank, while it trains."""
    load_host_bytes: int = 0
    """Host memory of this rank at the peak of loading: the whole model, unless it is built on meta; before or beside the states."""
    save_host_bytes: int = 0
    """Host memory that rank 0 alone holds more while it saves: the model gathered whole."""
    collectives: tuple[Collective, ...] = ()

    @property
    def peak(self) -> Moment:
        """The fullest moment; the earliest of equals."""
        return max(self.moments, key=lambda moment: moment.allocated_bytes)

    @property
    def allocated_bytes(self) -> int:
        return self.peak.allocated_bytes

    def phase_bytes(self, phase: Phase) -> int:
        return max((moment.allocated_bytes for moment in self.moments if moment.phase == phase), default=0)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: dict[str, Any]) -> Ledger:
        def moment(raw: dict[str, Any]) -> Moment:
            return Moment(**{**raw, "items": tuple(MemoryItem(**item) for item in raw["items"])})

        return Ledger(
            **{
                **value,
                "moments": tuple(map(moment, value["moments"])),
                "collectives": tuple(Collective(**raw) for raw in value["collectives"]),
            }
        )
