"""What lint says: one finding, the findings of one file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
Reader = Literal["deepspeed", "trainer", "accelerate"]
READERS: tuple[Reader, ...] = ("deepspeed", "trainer", "accelerate")
Moment = Literal["load", "parse", "init", "step"]
"""When a reader raises: while it reads the text, while it makes its config object of it, when the engine starts, in training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Where in the text: 1-based, in characters; the end is exclusive."""

    line: int
    column: int
    end_line: int
    end_column: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """Replace the characters start..end (0-based offsets into the text) by `text`."""

    start: int
    end: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """Edits that belong together. safe: the meaning that the reader sees does not change, or nothing else was meant."""

    safe: bool
    edits: tuple[Edit, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One finding. pointer is RFC 6901; about is the reader that it speaks of."""

    rule: str
    name: str
    severity: Severity
    pointer: str
    span: Span
    message: str
    about: Reader
    remedy: str = ""
    """The smallest change, shown under the caret; may be empty."""
    fix: Fix | None = None
    raises: Moment | None = None
    """When the reader raises on it; None: it never does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedRule:
    """A rule that could not run, and the option that would give it what it needs."""

    rule: str
    needs: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFindings:
    """All that lint says of one configuration. `text` is its file's text, for snippets; `file` is what reports call it."""

    file: str
    read_as: Reader
    text: str
    release: str = "0.19.8"
    """Of DeepSpeed: the one that is meant to read the file."""
    findings: tuple[Finding, ...]
    skipped_rules: tuple[SkippedRule, ...] = ()
    placeholders: tuple[str, ...] = ()
    """What the text leaves to somebody else, by the names that --define knows."""
    suppressed: tuple[Finding, ...] = ()
    """What the file, or its project, asked not to be told."""

    @property
    def path(self) -> str:
        """The file on disk: without the place inside it, as in train.yaml#/deepspeed or train.py#ds_config."""
        return re.sub(r"(\.(?:ya?ml|py|json))#.*", r"\1", self.file, flags=re.S)
