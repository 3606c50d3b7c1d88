"""Reports as text for a terminal."""

from __future__ import annotations

import unicodedata
from collections import Counter
from typing import TYPE_CHECKING

from dsplan.schemas.finding import SEVERITIES, FileFindings, Finding
from dsplan.schemas.positions import Lines

if TYPE_CHECKING:
    from collections.abc import Sequence

_COLORS = {"error": "31", "warning": "33", "info": "36"}
_READERS = {"trainer": "HF Trainer", "accelerate": "Accelerate"}
_WIDTH = 100
"""Characters of a source line that are shown; more is cut around the place."""


def findings(files: Sequence[FileFindings], color: bool = False) -> str:
    """Each finding with its line and a caret under the place; the last line counts them."""
    parts = []
    for file in files:
        lines = Lines(file.text)
        parts += [_finding(file.file, finding, lines, color) for finding in file.findings]
    return "\n".join([*parts, summary(files)])


def _finding(file: str, finding: Finding, lines: Lines, color: bool) -> str:
    span = finding.span
    severity = _colored(finding.severity, _COLORS[finding.severity], color)
    head = f"{printable(file)}:{span.line}:{span.column}: {severity}: {printable(finding.message)} [{finding.rule} {finding.name}]"
    if span.line > len(lines.starts) or not lines.line_text(span.line).strip():
        return head + (f"\n   = {printable(finding.remedy)}" if finding.remedy else "")
    return head + "\n" + _snippet(finding, lines, color)


def _snippet(finding: Finding, lines: Lines, color: bool) -> str:
    span, line = finding.span, lines.line_text(finding.span.line)
    start = span.column - 1
    end = max(span.end_column - 1 if span.end_line == span.line else len(line), start + 1)
    cut = max(start - _WIDTH // 2, 0) if len(line) > _WIDTH else 0
    shown = line[cut : cut + _WIDTH]
    before, after = ("..." if cut else ""), ("..." if cut + _WIDTH < len(line) else "")
    number = str(span.line)
    gutter = " " * len(number)
    caret = "^" + "~" * (min(end, cut + _WIDTH) - start - 1)
    indent = " " * (len(before) + _columns(printable(line[cut:start])))
    remedy = f" {printable(finding.remedy)}" if finding.remedy else ""
    under = _colored(caret, _COLORS[finding.severity], color) + remedy
    return f"{gutter} |\n{number} | {before}{printable(shown)}{after}\n{gutter} | {indent}{under}"


def statistics(files: Sequence[FileFindings]) -> str:
    """How often each rule found something, the most frequent first; the last line counts all."""
    counts = Counter((finding.rule, finding.name) for file in files for finding in file.findings)
    width = max((len(str(count)) for count in counts.values()), default=0)
    ordered = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))
    return "\n".join([*(f"{count:{width}}  {rule}  {name}" for (rule, name), count in ordered), summary(files)])


def printable(text: str) -> str:
    """The text on one line, with nothing in it that moves a terminal's cursor."""
    return "".join(
        char if char.isprintable() else " " if char in "\t\r\n" else "\N{REPLACEMENT CHARACTER}" for char in text
    )


def _columns(text: str) -> int:
    """Columns that a terminal takes for it."""
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


def _colored(text: str, code: str, color: bool) -> str:
    return f"\033[{code}m{text}\033[0m" if color else text


def summary(files: Sequence[FileFindings]) -> str:
    findings = [finding for file in files for finding in file.findings]
    counts = Counter(finding.severity for finding in findings)
    said = [_plural(counts[severity], severity) for severity in SEVERITIES if counts[severity]]
    configs = [
        file for file in files if not file.file.endswith("pyproject.toml")
    ]  # of which only its ignores are judged
    readers = Counter(_reader(file) for file in configs)
    if len(readers) == 1:
        read = f"read as {next(iter(readers))} reads {'it' if len(configs) == 1 else 'them'}"
    else:
        read = "read as their readers do: " + ", ".join(f"{reader} ({count})" for reader, count in readers.items())
    where = f"in {_plural(len(configs), 'file')}, {read}{_skipped(files)}"
    return f"{', '.join(said) or 'no findings'} {where}{_fixable(findings)}"


def _fixable(findings: Sequence[Finding]) -> str:
    safe, unsafe = (sum(one.fix is not None and one.fix.safe is kind for one in findings) for kind in (True, False))
    if safe and unsafe:
        return f"; {safe} fixable with --fix, {unsafe} more with --unsafe-fixes"
    return f"; {safe or unsafe} fixable with {'--fix' if safe else '--unsafe-fixes'}" if safe or unsafe else ""


def _reader(file: FileFindings) -> str:
    """DeepSpeed by its release."""
    return f"DeepSpeed {file.release}" if file.read_as == "deepspeed" else _READERS[file.read_as]


def _skipped(files: Sequence[FileFindings]) -> str:
    skipped = {rule.rule: rule.needs for file in files for rule in file.skipped_rules}
    if not skipped:
        return ""
    needs = dict.fromkeys(
        need
        for text in skipped.values()
        for need in (text.split() if all(word.startswith("--") for word in text.split()) else [text])
    )
    return f" ({_plural(len(skipped), 'rule')} skipped: pass {', '.join(needs)})"


def _plural(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 or word == "info" else f"{count} {word}s"
