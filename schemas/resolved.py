"""A configuration as its reader holds it: every value with where it is from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from dsplan.schemas.finding import Reader

Origin = Literal["file", "default", "auto", "reader", "coerced", "ignored", "derived"]
"""file: as it is written. default: not there, or an "auto" that is dropped. auto: an "auto" that the HF Trainer or Accelerate
fills. reader: put there by them unasked. coerced: written otherwise ("2", 5e8, true). ignored: nothing reads it.
derived: follows from others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One value. pointer is RFC 6901; note says more of the origin, as a clause; it may be empty."""

    pointer: str
    value: Any
    origin: Origin
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """All values of one configuration, in the file's order, each block's defaults behind what the file names."""

    file: str
    read_as: Reader
    ranks: int | None
    """GPUs that share the batch; None: not known."""
    values: tuple[Held, ...]
    refusals: tuple[str, ...] = ()
    """What the HF Trainer or Accelerate refuses before DeepSpeed is given the values, each with its place."""

    def by_pointer(self) -> dict[str, Held]:
        return {held.pointer: held for held in self.values}


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One key whose effective value differs; None: that side has no such value. decides: it changes what is trained."""

    pointer: str
    a: Held | None
    b: Held | None
    decides: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two configurations by effective value, and whether they train the same model."""

    a: Resolved
    b: Resolved
    differences: tuple[Difference, ...]
    same_model: bool
    because: tuple[str, ...]
