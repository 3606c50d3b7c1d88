"""Templates: a text with placeholders, read as if each were a value that nobody knows yet.

Three kinds, as envsubst, Jinja and sed fill them: ${X} or $X, {{ x }} and a bare upper-case word. Jinja's blocks are taken
out before (jinja.py).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from dsplan.schemas.jinja import blank, has_blocks

MARK = "\ue000"
"""A character of the private use area: no configuration holds it."""
_HOLE = r"\$\{[^{}\n]*\}|\$[A-Z_][A-Z0-9_]*|\{\{.*?\}\}"
_HOLES = re.compile(_HOLE, re.DOTALL)
_WORD = r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+|[A-Z][A-Z0-9]+"
_BARE = re.compile(rf"[:,\[]\s*(?:{_WORD})\s*(?:[,}}\]\r\n]|\Z)")
_NOT_OPEN = {"NULL", "TRUE", "FALSE", "NONE", "NAN", "INF", "INFINITY", "AUTO", "ON", "OFF", "YES", "NO"}
"""Upper-case words that mean a value, wrongly written."""
_NAME = re.compile(r"[-\s]*(?P<name>[A-Za-z_][\w.]*)\s*(?:\|.*|[-\s]*)\Z", re.DOTALL)
_SEPARATOR = re.compile(r"""\{\{-?\s*(["']),\s*\1""")
"""An expression that writes a comma, as people end the entries of a loop."""


MOST_CHARACTERS = 1_000_000
"""Of a template: more was written by a program, and would take seconds."""


def is_template(text: str) -> bool:
    """The text may hold placeholders: quick, and never wrong with no."""
    if len(text) > MOST_CHARACTERS:
        return False
    return "$" in text or "{{" in text or has_blocks(text) or _BARE.search(text) is not None


def masked(text: str) -> tuple[str, dict[int, str], dict[int, str]]:
    """The text, as long as before, with quoted MARKs for each placeholder outside quotes; where each began, as written.

    Last, the same of those that stand for whole members, of which nothing is left.
    """
    written: dict[int, str] = {}
    members: dict[int, str] = {}
    chars = list(text)
    for start, end, is_member in _outside_quotes(text):
        if _SEPARATOR.match(text, start):
            chars[start:end] = blank(text[start:end])
        elif is_member:  # which members these are is not known
            members[start] = text[start:end]
            chars[start:end] = blank(text[start:end])
            chars[_comma_beside(text, chars, start, end)] = " "
        else:
            written[start] = text[start:end]
            chars[start:end] = _quoted(text[start:end])
    return "".join(chars), written, members


def holes(text: str) -> list[str]:
    """The placeholders in a text, as they are written."""
    return [match[0] for match in _HOLES.finditer(text)] if "$" in text or "{{" in text else []


def hole_name(hole: str) -> str:
    """What --define calls it: X of ${X}, $X, ${X:-8}, {{ X }}, {{ X | int }} and of X itself; else the whole expression."""
    if hole.startswith("${"):
        return re.split(r":[-=?+]", hole[2:-1].removeprefix("oc.env:"), maxsplit=1)[0].strip()
    if hole.startswith("{{"):
        inside = hole[2:-2]
        found = _NAME.match(inside)
        return found["name"] if found else " ".join(inside.strip("-").split())
    return hole.removeprefix("$")


def filled(written: str, defines: Mapping[str, str]) -> Any:
    """The value of a written text once its placeholders are filled; it must hold none that defines does not name."""
    import json

    text = _HOLES.sub(lambda match: defines[hole_name(match[0])], written)
    text = defines.get(text, text)
    try:
        return json.loads(text)
    except ValueError:
        return text


def names(written: str) -> tuple[str, ...]:
    """The names of the placeholders in what is written there: several in "${A}/${B}", one in a bare word."""
    return tuple(hole_name(hole) for hole in holes(written)) or (written,)


@functools.cache
def _token() -> re.Pattern[str]:
    """Compiled when a template comes: it takes longer than most files."""
    return re.compile(
        rf"""(?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')"""
        rf"""|(?P<comment>\#[^\n]*|//[^\n]*|/\*.*?\*/)"""
        rf"""|(?P<open>(?:[^\s,:\[\]{{}}"'$]*(?:{_HOLE}))+[^\s,:\[\]{{}}"']*)"""
        rf"""|(?P<word>[^\s,:\[\]{{}}"']+)|(?P<sign>[,:\[\]{{}}])""",
        re.DOTALL | re.VERBOSE,
    )


_SPACE = re.compile(r"\s*")
_WORD_ENDS = re.compile(r"[ \t]*([,}\]\r\n#/]|\Z)")


def _outside_quotes(text: str) -> Iterator[tuple[int, int, bool]]:
    """Start and end of each placeholder outside quotes and comments, and whether it stands for whole members."""
    nesting: list[str] = []
    key_next = False
    for token in _token().finditer(text):
        kind, word, (start, end) = token.lastgroup, token[0], token.span()
        if kind == "sign":
            if word in "{[":
                nesting.append(word)
            elif word in "}]" and nesting:
                nesting.pop()
            key_next = word in "{," and bool(nesting) and nesting[-1] == "{"
        elif kind == "open":
            yield start, end, key_next and not text.startswith(":", _end_of_space(text, end))
        elif kind == "word" and re.fullmatch(_WORD, word) and word not in _NOT_OPEN:
            before = text[max(start - 200, 0) : start].rstrip()[-1:]
            if before in tuple(":,[") and not key_next and _WORD_ENDS.match(text, end):
                yield start, end, False


def _end_of_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match
    return match.end()


def _comma_beside(text: str, chars: list[str], start: int, end: int) -> int:
    """Where the comma is that would be left over without the member; the member's own place where there is none."""
    after = _end_of_space(text, end)
    if text.startswith(",", after):
        return after
    before = start - 1
    while before >= 0 and chars[before].isspace():
        before -= 1
    return before if before >= 0 and chars[before] == "," else start


def _quoted(text: str) -> str:
    """A JSON text as long as this one; the rest of a placeholder over several lines is blank."""
    first, line_end, rest = text.partition("\n")
    return '"' + MARK * (len(first) - 2) + '"' + line_end + blank(rest)
