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
    part: str = ""
    """What of `file` names a part of the file on disk: #/deepspeed of train.yaml#/deepspeed."""
    read_as: Reader
    text: str
    release: str = "0.19.8"
    """Of DeepSpeed: the one that is meant to read the file."""
    findings: tuple[Finding, ...]
    skipped_rules: tuple[SkippedRule, ...] = ()
    placeholders: tuple[str, ...] = ()
    """What the text leaves to somebody else, by the names that --define knows."""
    ran: frozenset[str] | None = None
    """The rules that could have found something, by the options and the reader; None: all."""
    suppressed: tuple[Finding, ...] = ()
    """What the file, or its project, asked not to be told."""

    @property
    def path(self) -> str:
        """The file on disk: without the part of it that is meant."""
        return self.file.removesuffix(self.part) if self.part else self.file

    @property
    def lasting_part(self) -> str:
        """The part by a name that outlives a moved line: #ds_config of train.py#ds_config:12."""
        return re.sub(r":\d+$", "", self.part) if self.path.endswith(".py") else self.part
