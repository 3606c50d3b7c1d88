"""Which releases of DeepSpeed take a configuration, as a value."""

from __future__ import annotations

from dataclasses import dataclass

from dsplan.schemas.finding import Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What one release makes of a file. `first`: the first error on which it raises, else the first that it passes over."""

    release: str
    accepts: bool
    errors: int
    first: Finding | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """The verdicts on one file, oldest release first."""

    file: str
    verdicts: tuple[Verdict, ...]
