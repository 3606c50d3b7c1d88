"""Reads a configuration file and keeps where each key and value stands.

Two dialects. "json": what Python's json module takes (HF Trainer and Accelerate read so). "hjson": what the hjson package
takes (DeepSpeed reads so): comments, unquoted keys, single quotes, ''' multiline ''', trailing and missing commas, missing
outer braces, a byte-order mark, and words without quotes, which swallow the rest of their line.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dsplan.schemas.finding import Span
from dsplan.schemas.problem import Problem

Dialect = Literal["json", "hjson"]
MAX_DEPTH = 200
"""Levels of nesting. Far more than any configuration has, far fewer than Python's stack."""
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
    starts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        first = 1 if self.text.startswith(BOM) else 0
        self.starts = [first, *(match.end() for match in re.finditer(r"\r\n|\n|\r", self.text))]

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


def escape(name: str | int) -> str:
    """One step of a JSON pointer (RFC 6901)."""
    return str(name).replace("~", "~0").replace("/", "~1")


def steps(pointer: str) -> list[str]:
    """The names of a JSON pointer, unescaped."""
    return [step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:]]


class Document:
    """A parsed text. `value` is plain Python; every place is known by its JSON pointer.

    Where a key is there twice, the last one counts, as in both readers' dicts; `duplicates` lists them.
    """

    def __init__(self, text: str, dialect: Dialect):
        self.text = text
        self.dialect = dialect
        self.lines = Lines(text)
        self.value: Any = None
        self.duplicates: list[Duplicate] = []
        self.values_at: dict[str, tuple[int, int]] = {}
        self.keys_at: dict[str, tuple[int, int]] = {}

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
        for step in steps(pointer):
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


def read_document(text: str, dialect: Dialect) -> Document:
    """The text with its positions. SyntaxProblem where it is not of the dialect."""
    return (_Hjson if dialect == "hjson" else _Json)(text, dialect).document()


def read_text(path: str | Path) -> str:
    """The file's text. Problem where it cannot be had: missing, unreadable, a folder, not UTF-8."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise Problem(f"{path}: cannot be read ({error.strerror or error})") from error
    except ValueError as error:  # a NUL in the name
        raise Problem(f"{str(path)!r} is no file name ({error})") from error
    return decode(content, str(path))


def decode(content: bytes, name: str) -> str:
    """UTF-8 bytes as text. Problem where they are not UTF-8."""
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise Problem(f"{name}: is UTF-16 text; save it as UTF-8")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Problem(f"{name}: is not UTF-8 text (byte {error.start} is 0x{content[error.start]:02x})") from error
    if "\0" in text:
        raise Problem(f"{name}: is not text (it holds NUL bytes)")
    return text


def load_config_file(path: str | Path) -> dict[str, Any]:
    """A DeepSpeed configuration as DeepSpeed reads it: hjson, duplicate keys refused.

    Problem in one line, with file:line:column, where it cannot be read so.
    """
    text = read_text(path)
    try:
        document = read_document(text, "hjson")
    except SyntaxProblem as error:
        raise Problem(f"{path}:{error.span.line}:{error.span.column}: {error.message}") from error
    for duplicate in document.duplicates:
        key, again, first = steps(duplicate.pointer)[-1], duplicate.again, duplicate.first
        raise Problem(
            f'{path}:{again.line}:{again.column}: key "{key}" stands here a second time (first in line {first.line}); '
            "DeepSpeed refuses the file; remove one of the two"
        )
    if not isinstance(document.value, dict):
        raise Problem(f"{path}:1:1: the top level is {shape(document.value)}, but must be an object")
    return document.value


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


class _Parser:
    """What both dialects share: the text, the positions, the depth guard."""

    def __init__(self, text: str, dialect: Dialect):
        self.text = text
        self.doc = Document(text, dialect)
        self.depth = 0

    def wrong(self, message: str, start: int, end: int | None = None) -> SyntaxProblem:
        start = min(start, len(self.text))
        return SyntaxProblem(message, self.doc.lines.span(start, min(start + 1, len(self.text)) if end is None else end))

    def deeper(self, at: int) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.wrong(f"nested more than {MAX_DEPTH} levels deep", at)

    def member(self, into: dict[str, Any], pointer: str, key: str, key_at: tuple[int, int]) -> str:
        """Notes the key; returns the pointer of its value."""
        inner = f"{pointer}/{escape(key)}"
        if key in into:
            span = self.doc.lines.span
            self.doc.duplicates.append(Duplicate(inner, span(*self.doc.keys_at[inner]), span(*key_at)))
            del into[key]  # so that the order is that of the one that counts
        self.doc.keys_at[inner] = key_at
        return inner

    def found(self, at: int) -> str:
        return "the end of the file" if at >= len(self.text) else shape(self.text[at])

    def whole(self, digits: str, at: int) -> int:
        try:
            return int(digits)
        except ValueError as error:
            raise self.wrong("a whole number of more than 4300 digits", at) from error


_JSON_SPACE = re.compile(r"[ \t\n\r]*")
_JSON_NUMBER = re.compile(r"(-?(?:0|[1-9]\d*))(\.\d+)?([eE][-+]?\d+)?", re.ASCII)
_JSON_TEXT = re.compile(r'[^"\\\x00-\x1f]*')
_JSON_WORDS = {
    "null": None,
    "true": True,
    "false": False,
    "NaN": float("nan"),
    "Infinity": float("inf"),
    "-Infinity": float("-inf"),
}
_JSON_WORD = re.compile("|".join(_JSON_WORDS))
_ESCAPES = {'"': '"', "'": "'", "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_WORD = re.compile(r"[^\s,:\[\]{}]+")
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


class _Json(_Parser):
    """Strict JSON, as Python's json takes it: NaN and the infinities pass, a BOM does not."""

    def document(self) -> Document:
        if self.text.startswith(BOM):
            raise self.wrong("the file starts with a byte-order mark, which strict JSON refuses; save it without one", 0)
        value, end = self.value(self.skip(0), "")
        end = self.skip(end)
        if end < len(self.text):
            raise self.wrong("text after the end of the value", end)
        self.doc.value = value
        return self.doc

    def skip(self, at: int) -> int:
        match = _JSON_SPACE.match(self.text, at)
        assert match
        return match.end()

    def value(self, at: int, pointer: str) -> tuple[Any, int]:
        value, end = self._value(at, pointer)
        self.doc.values_at[pointer] = (at, end)
        return value, end

    def _value(self, at: int, pointer: str) -> tuple[Any, int]:
        char = self.text[at : at + 1]
        if char == '"':
            return self.string(at)
        if char == "{":
            return self.object(at, pointer)
        if char == "[":
            return self.list(at, pointer)
        if match := _JSON_WORD.match(self.text, at):
            return _JSON_WORDS[match[0]], match.end()
        if match := _JSON_NUMBER.match(self.text, at):
            whole, fraction, exponent = match.groups()
            value = float(match[0]) if fraction or exponent else self.whole(whole, at)
            return value, match.end()
        if self.text.startswith(("#", "//", "/*"), at):
            raise self.wrong("a comment, which strict JSON refuses", at)
        if word := _WORD.match(self.text, at):
            hint = f"; write {_PYTHON_WORDS[word[0]]}" if word[0] in _PYTHON_WORDS else ""
            raise self.wrong(f"a value is expected, but here is {word[0][:40]}{hint}", at, word.end())
        raise self.wrong(f"a value is expected, but here is {self.found(at)}", at)

    def string(self, at: int) -> tuple[str, int]:
        parts: list[str] = []
        end = at + 1
        while True:
            match = _JSON_TEXT.match(self.text, end)
            assert match
            parts.append(match[0])
            end = match.end()
            char = self.text[end : end + 1]
            if char == '"':
                return "".join(parts), end + 1
            if char == "":
                raise self.wrong("a text without its closing quote", at, end)
            if char != "\\":
                raise self.wrong("a line break or control character inside a text", end)
            escaped = self.text[end + 1 : end + 2]
            if escaped == "u":
                part, end = self.unicode_escape(end)
                parts.append(part)
            elif escaped in _ESCAPES and escaped not in ("'", ""):
                parts.append(_ESCAPES[escaped])
                end += 2
            else:
                raise self.wrong(f"\\{escaped} is no escape of JSON", end, end + 2)

    def unicode_escape(self, at: int) -> tuple[str, int]:
        first, end = self.code_unit(at), at + 6
        if 0xD800 <= first < 0xDC00 and self.text.startswith("\\u", end):
            second = self.code_unit(end)
            if 0xDC00 <= second < 0xE000:
                return chr(0x10000 + ((first - 0xD800) << 10) + second - 0xDC00), end + 6
        return chr(first), end

    def code_unit(self, at: int) -> int:
        digits = self.text[at + 2 : at + 6]
        if not re.fullmatch(r"[0-9a-fA-F]{4}", digits):
            raise self.wrong("\\u needs four hexadecimal digits", at, min(at + 6, len(self.text)))
        return int(digits, 16)

    def object(self, at: int, pointer: str) -> tuple[dict[str, Any], int]:
        self.deeper(at)
        into: dict[str, Any] = {}
        end = self.skip(at + 1)
        if self.text[end : end + 1] != "}":
            while True:
                if self.text[end : end + 1] != '"':
                    raise self.wrong(self.no_key(end), end)
                start = end
                key, end = self.string(start)
                inner = self.member(into, pointer, key, (start, end))
                end = self.skip(end)
                if self.text[end : end + 1] != ":":
                    raise self.wrong(f"a colon is expected after the key {shape(key)}, but here is {self.found(end)}", end)
                into[key], end = self.value(self.skip(end + 1), inner)
                end = self.skip(end)
                if self.text[end : end + 1] == "}":
                    break
                if self.text[end : end + 1] != ",":
                    raise self.wrong(f"a comma or }} is expected, but here is {self.found(end)}", end)
                end = self.skip(end + 1)
        self.depth -= 1
        return into, end + 1

    def no_key(self, at: int) -> str:
        if self.text.startswith(("#", "//", "/*"), at):
            return "a comment, which strict JSON refuses"
        if self.text.startswith("}", at):
            return "a comma before }, which strict JSON refuses"
        return f"a key in double quotes is expected, but here is {self.found(at)}"

    def list(self, at: int, pointer: str) -> tuple[list[Any], int]:
        self.deeper(at)
        into: list[Any] = []
        end = self.skip(at + 1)
        if self.text[end : end + 1] != "]":
            while True:
                value, end = self.value(end, f"{pointer}/{len(into)}")
                into.append(value)
                end = self.skip(end)
                if self.text[end : end + 1] == "]":
                    break
                if self.text[end : end + 1] != ",":
                    raise self.wrong(f"a comma or ] is expected, but here is {self.found(end)}", end)
                end = self.skip(end + 1)
                if self.text[end : end + 1] == "]":
                    raise self.wrong("a comma before ], which strict JSON refuses", end)
        self.depth -= 1
        return into, end + 1


_HJSON_SPACE = " \t\n\r"
_HJSON_NUMBER = re.compile(r"[\t ]*(-?(?:0|[1-9]\d*))(\.\d+)?([eE][-+]?\d+)?[\t ]*")
_HJSON_TEXT = re.compile(r"[^'\"\\\x00-\x1f]*")
_HJSON_STOP = re.compile(r"[\r\n,}\]#]|//|/\*|$(?![\s\S])")
_INDENT = re.compile(r"[ \t\r]*")


class _Fatal(SyntaxProblem):
    """hjson gives up here, and does not try the text as a single value."""


class _Hjson(_Parser):
    """hjson, as version 3.1 of the package takes it (which DeepSpeed requires)."""

    def __init__(self, text: str, dialect: Dialect):
        super().__init__(text, dialect)
        self.swallowed: tuple[int, int] | None = None
        """The last word without quotes that took a comma, brace or bracket with it."""

    def document(self) -> Document:
        start = 1 if self.text.startswith(BOM) else 3 if self.text.startswith("\xef\xbb\xbf") else 0
        at = self.skip(start)
        if at >= len(self.text) and start == 0:  # blank: an empty object
            self.doc.value, self.doc.values_at[""] = {}, (0, 0)
            return self.doc
        if self.text[at : at + 1] in ("{", "["):
            value, end = self.value(at, "")
        else:
            try:
                value, end = self.object(at, "", braces=False)
                self.doc.values_at[""] = (at, end)
            except _Fatal:
                raise
            except SyntaxProblem as error:  # no object without its braces: one value, perhaps
                self.doc = Document(self.text, "hjson")
                self.depth = 0
                try:
                    value, end = self.value(at, "")
                except SyntaxProblem:
                    raise error from None
                if self.skip(end) < len(self.text):
                    raise error from None
        end = self.skip(end)
        if end < len(self.text):
            raise self.wrong("text after the end of the configuration", end)
        self.doc.value = value
        return self.doc

    def skip(self, at: int) -> int:
        text, size = self.text, len(self.text)
        while at < size:
            if text[at] in _HJSON_SPACE:
                at += 1
            elif text[at] == "#" or text.startswith("//", at):
                while at < size and text[at] not in "\r\n":
                    at += 1
            elif text.startswith("/*", at):
                end = text.find("*/", at + 2)
                if end < 0:
                    raise self.fatal("a comment /* without its */", at)
                at = end + 2
            else:
                break
        return at

    def fatal(self, message: str, at: int) -> _Fatal:
        problem = self.wrong(message, at)
        return _Fatal(problem.message, problem.span)

    def unfinished(self, what: str, at: int) -> SyntaxProblem:
        """The file ends too early: the cause is often a word without quotes that took the closing brace with it."""
        if self.swallowed:
            start, end = self.swallowed
            text = self.text[start:end].strip()
            word = _WORD.match(text)
            meant = _PYTHON_WORDS.get(word[0]) if word else None
            remedy = f"write {meant}" if meant else "put it in quotes, or the rest on a line of its own"
            return self.wrong(
                f"{what}, since a word without quotes takes the rest of its line as text: {shape(text)}; {remedy}", start, end
            )
        return self.wrong(what, at)

    def value(self, at: int, pointer: str) -> tuple[Any, int]:
        char = self.text[at : at + 1]
        if char == "":
            raise self.unfinished("a value is expected, but the file ends", at)
        if char in ("'", '"'):
            value, end = self.multiline(at) if self.text.startswith("'''", at) else self.string(at)
        elif char == "{":
            value, end = self.object(at, pointer)
        elif char == "[":
            value, end = self.list(at, pointer)
        else:
            value, end = self.quoteless(at)
        self.doc.values_at[pointer] = (at, end)
        return value, end

    def string(self, at: int) -> tuple[str, int]:
        quote = self.text[at]
        parts: list[str] = []
        end = at + 1
        while True:
            match = _HJSON_TEXT.match(self.text, end)
            assert match
            parts.append(match[0])
            end = match.end()
            char = self.text[end : end + 1]
            if char == quote:
                return "".join(parts), end + 1
            if char == "":
                raise self.wrong("a text without its closing quote", at, end)
            if char in ("'", '"'):
                parts.append(char)
                end += 1
            elif char != "\\":
                raise self.wrong("a line break or control character inside a text", end)
            elif self.text[end + 1 : end + 2] == "u":
                part, end = self.unicode_escape(end)
                parts.append(part)
            else:
                escaped = self.text[end + 1 : end + 2]
                if escaped not in _ESCAPES:
                    raise self.wrong(f"\\{escaped} is no escape", end, min(end + 2, len(self.text)))
                parts.append(_ESCAPES[escaped])
                end += 2

    def unicode_escape(self, at: int) -> tuple[str, int]:
        first, end = self.code_unit(at), at + 6
        if first & 0xFC00 == 0xD800 and self.text.startswith("\\u", end):
            digits = self.text[end + 2 : end + 6]
            if len(digits) == 4 and digits[1] not in "xX":
                second = self.code_unit(end)
                if second & 0xFC00 == 0xDC00:
                    return chr(0x10000 + ((first - 0xD800) << 10 | second - 0xDC00)), end + 6
        return self.character(first, at), end

    def code_unit(self, at: int) -> int:
        digits = self.text[at + 2 : at + 6]
        try:
            if len(digits) != 4 or digits[1] in "xX":
                raise ValueError
            return int(digits, 16)
        except ValueError:
            raise self.wrong("\\u needs four hexadecimal digits", at, min(at + 6, len(self.text))) from None

    def character(self, code: int, at: int) -> str:
        if code < 0:  # "\u-123"
            raise self.fatal("\\u needs four hexadecimal digits", at)
        return chr(code)

    def multiline(self, at: int) -> tuple[str, int]:
        """''' text ''': each line loses as much indent as the opening quotes have before them."""
        text, size = self.text, len(self.text)
        indent = at - text.rfind("\n", 0, at) - 1
        if text.rfind("\n", 0, at) < 0:
            # the package looks for the line's start beyond the text's start, that is from the end
            last = text.rfind("\n", at)
            if last < 0:
                raise self.fatal("a text in ''' on the first line of a file without a second", at)
            indent = at - 1 - last + size

        def after_indent(start: int, limit: int) -> int:
            match = _INDENT.match(text, start)
            assert match
            return match.end() if limit < 0 else min(match.end(), start + limit)

        end = after_indent(at + 3, -1)
        if end >= size:
            raise self.fatal("a text without its closing '''", at)
        if text[end] == "\n":
            end = after_indent(end + 1, indent)
        parts: list[str] = []
        quotes = 0
        while True:
            char = text[end : end + 1]
            if char == "":
                raise self.wrong("a text without its closing '''", at)
            if char == "'":
                quotes += 1
                end += 1
                if quotes == 3:
                    whole = "".join(parts)
                    return whole[:-1] if whole.endswith("\n") else whole, end
                continue
            parts.append("'" * quotes)
            quotes = 0
            if char == "\n":
                parts.append(char)
                end = after_indent(end + 1, indent)
            else:
                if char != "\r":
                    parts.append(char)
                end += 1

    def quoteless(self, at: int) -> tuple[Any, int]:
        """null, true, false, a number; else the rest of the line, commas and braces included."""
        text = self.text
        if text[at] in "{}[],:":
            raise self.wrong(f"a value is expected, but here is {self.found(at)}", at)
        stop = at
        while True:
            match = _HJSON_STOP.search(text, stop)
            assert match
            stop = match.start()
            word = text[at:stop].strip()
            if word in ("null", "true", "false"):
                return _JSON_WORDS[word], at + len(word)
            if text[at] == "-" or "0" <= text[at] <= "9":
                number = _HJSON_NUMBER.match(text, at)
                if number and number.end() == stop:
                    return self.number(number, at), at + len(word)
            if stop >= len(text) or text[stop] in "\r\n":
                if any(char in text[at:stop] for char in ",}]"):
                    self.swallowed = (at, stop)
                return word, at + len(text[at:stop].rstrip())
            stop = match.end()

    def number(self, match: re.Match[str], at: int) -> int | float:
        whole, fraction, exponent = match.groups()
        if not (fraction or exponent):
            return self.whole(whole, at)
        value = float(match[0])
        if value in (float("inf"), float("-inf")):
            raise self.fatal("a number too large for a float", at)
        return int(value) if int(value) == value and abs(value) < 1e10 else value

    def key(self, at: int) -> tuple[str, int]:
        text = self.text
        if text[at : at + 1] in ("'", '"'):
            return self.string(at)
        end, space = at, -1
        while True:
            char = text[end : end + 1]
            if char == "":
                raise self.unfinished("an object without its closing brace" if end == at else "a key without a value", at)
            if char == ":":
                if end == at:
                    raise self.wrong("a colon without a key before it", at)
                if space >= 0 and space != end - 1:
                    raise self.wrong("a key with a space in it needs quotes", at, end)
                return text[at:end].rstrip(_HJSON_SPACE), end
            if char in _HJSON_SPACE:
                if space < 0 or space == end - 1:
                    space = end
            elif char in "{}[],":
                raise self.wrong(f"a key is expected, but here is {self.found(end)}", end)
            end += 1

    def object(self, at: int, pointer: str, braces: bool = True) -> tuple[dict[str, Any], int]:
        self.deeper(at)
        into: dict[str, Any] = {}
        end = self.skip(at + 1) if braces else at
        if not (braces and self.text[end : end + 1] == "}"):
            while True:
                start = end
                key, end = self.key(start)
                key_end = start + len(self.text[start:end].rstrip(_HJSON_SPACE))
                inner = self.member(into, pointer, key, (start, key_end))
                end = self.skip(end)
                if self.text[end : end + 1] != ":":
                    raise self.wrong(f"a colon is expected after the key {shape(key)}, but here is {self.found(end)}", end)
                into[key], end = self.value(self.skip(end + 1), inner)
                end = self.skip(end)
                if self.text[end : end + 1] == ",":
                    end = self.skip(end + 1)
                if braces and self.text[end : end + 1] == "}":
                    break
                if not braces and end >= len(self.text):
                    self.depth -= 1
                    return into, end
        self.depth -= 1
        return into, end + 1

    def list(self, at: int, pointer: str) -> tuple[list[Any], int]:
        self.deeper(at)
        into: list[Any] = []
        end = self.skip(at + 1)
        if self.text[end : end + 1] != "]":
            while True:
                if end >= len(self.text):
                    raise self.unfinished("a list without its closing bracket", at)
                value, end = self.value(end, f"{pointer}/{len(into)}")
                into.append(value)
                end = self.skip(end)
                if self.text[end : end + 1] == ",":
                    end = self.skip(end + 1)
                if self.text[end : end + 1] == "]":
                    break
        self.depth -= 1
        return into, end + 1
