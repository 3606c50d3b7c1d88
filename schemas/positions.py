"""A parsed text that knows where each of its keys and values stands."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

from dsplan.schemas.finding import Span

if TYPE_CHECKING:
    from collections.abc import Iterator

Dialect = Literal["json", "hjson", "yaml", "python"]
BOM = "\ufeff"


class SyntaxProblem(Exception):
    """The text is not of its dialect. `span` is where; `str()` is what, in one line."""

    def __init__(self, message: str, span: Span):
        super().__init__(message)
        self.message = message
        self.span = span


@dataclass(frozen=True, slots=True)
class Duplicate:
    """A key that its object has already: both places."""

    pointer: str
    first: Span
    again: Span


@dataclass(slots=True)
class Lines:
    """Offsets of a text to 1-based line and column, in characters. Lines end at \\n, \\r\\n or \\r; a BOM has no column."""

    text: str

    @property
    def starts(self) -> list[int]:
        """Where each line starts."""
        return _line_starts(self.text)

    def place(self, offset: int) -> tuple[int, int]:
        line = max(bisect_right(self.starts, offset), 1)
        return line, max(offset - self.starts[line - 1], 0) + 1

    def span(self, start: int, end: int) -> Span:
        (line, column), (end_line, end_column) = self.place(start), self.place(end)
        return Span(line=line, column=column, end_line=end_line, end_column=end_column)

    def line_text(self, line: int) -> str:
        """The text of that line, without its end."""
        end = self.starts[line] if line < len(self.starts) else len(self.text)
        return self.text[self.starts[line - 1] : end].rstrip("\r\n")


@lru_cache(maxsize=4)
def _line_starts(text: str) -> list[int]:
    """Counted when they are first asked for. A text of ten million lines takes a second."""
    lines = text.replace("\r\n", " \n").replace("\r", "\n").split("\n")
    starts = [0, *accumulate(len(line) + 1 for line in lines[:-1])]
    starts[0] = 1 if text.startswith(BOM) else 0
    return starts


def escape(name: str | int) -> str:
    """One step of a JSON pointer (RFC 6901)."""
    return str(name).replace("~", "~0").replace("/", "~1")


def steps(pointer: str) -> list[str]:
    """The names of a JSON pointer, unescaped."""
    return list(_steps(pointer))


@lru_cache(maxsize=10_000)  # rules ask for the same few pointers again and again
def _steps(pointer: str) -> tuple[str, ...]:
    if "~" not in pointer:
        return tuple(pointer.split("/")[1:])
    return tuple(step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:])


class Document:
    """A parsed text. `value` is plain Python; every place is known by its JSON pointer.

    Where a key is there twice, the last one counts, as in both readers' dicts; `duplicates` lists them. `open`: the values
    that the text leaves to somebody else (placeholders, names of a program), by pointer, as they are written; `more`: the
    objects to which somebody else adds members, likewise.
    """

    def __init__(self, text: str, dialect: Dialect):
        self.text = text
        self.dialect = dialect
        self.lines = Lines(text)
        self.value: Any = None
        self.duplicates: list[Duplicate] = []
        self.values_at: dict[str, tuple[int, int]] = {}
        self.keys_at: dict[str, tuple[int, int]] = {}
        self.open: dict[str, str] = {}
        self.more: dict[str, str] = {}

    def span(self, pointer: str) -> Span:
        """Of the value."""
        return self.lines.span(*self.values_at[pointer])

    def key_span(self, pointer: str) -> Span:
        """Of the key, with its quotes. KeyError for members of a list and for the root."""
        return self.lines.span(*self.keys_at[pointer])

    def raw(self, pointer: str) -> str:
        """The value as it is written."""
        start, end = self.values_at[pointer]
        return self.text[start:end]

    def at(self, pointer: str, default: Any = None) -> Any:
        """The value there, or the default where there is none."""
        value = self.value
        for step in _steps(pointer):
            if isinstance(value, dict) and step in value:
                value = value[step]
            elif isinstance(value, list) and step.isascii() and step.isdigit() and int(step) < len(value):
                value = value[int(step)]
            else:
                return default
        return value

    def has(self, pointer: str) -> bool:
        missing = object()
        return self.at(pointer, missing) is not missing

    def part(self, pointer: str) -> Document:
        """What stands at the pointer as a document of its own, over the same text. KeyError where nothing does."""
        inner = Document(self.text, self.dialect)
        inner.value, inner.values_at[""] = self.at(pointer), self.values_at[pointer]
        inside, size = f"{pointer}/", len(pointer)
        inner.values_at.update({at[size:]: span for at, span in self.values_at.items() if at.startswith(inside)})
        inner.keys_at.update({at[size:]: span for at, span in self.keys_at.items() if at.startswith(inside)})
        inner.open.update({at[size:]: text for at, text in self.open.items() if at.startswith(inside)})
        inner.more.update({at[size:]: text for at, text in self.more.items() if at == pointer or at.startswith(inside)})
        inner.duplicates = [
            Duplicate(duplicate.pointer[len(pointer) :], duplicate.first, duplicate.again)
            for duplicate in self.duplicates
            if duplicate.pointer.startswith(f"{pointer}/")
        ]
        return inner

    def walk(self) -> Iterator[tuple[str, Any]]:
        """Every (pointer, value), parents before children, in the order of the text."""
        waiting: list[tuple[str, Any]] = [("", self.value)]
        while waiting:
            pointer, value = waiting.pop()
            yield pointer, value
            if isinstance(value, dict):
                waiting += [(f"{pointer}/{escape(key)}", member) for key, member in reversed(value.items())]
            elif isinstance(value, list):
                waiting += [(f"{pointer}/{index}", member) for index, member in reversed(list(enumerate(value)))]


def shape(value: Any) -> str:
    """A value as a message names it: null, true, 12, "text", a list, an object."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        short = value if len(value) <= 40 else value[:37] + "..."
        return '"' + "".join(char if char.isprintable() else repr(char)[1:-1] for char in short) + '"'
    if isinstance(value, (int, float)):
        return number(value)
    return "a list" if isinstance(value, list) else "an object"


def number(value: int | float) -> str:
    """A number as people write it."""
    if isinstance(value, int):
        # Python refuses to print integers of more than 4300 digits
        return str(value) if abs(value) < 10**20 else f"{value:.3e}" if abs(value) < 10**300 else "a huge number"
    return repr(value)
