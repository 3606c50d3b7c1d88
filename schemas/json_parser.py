"""The parser of strict JSON, and what it shares with the one of hjson."""

from __future__ import annotations

import re
from typing import Any

from dsplan.schemas.positions import BOM, Dialect, Document, Duplicate, SyntaxProblem, escape, shape

MAX_DEPTH = 100
"""Levels of nesting. Far more than any configuration has, far fewer than Python's stack."""
MAX_VALUES = 10_000
"""Values in one text. Configurations have some hundred; more would take lint seconds."""

WORDS = {
    "null": None,
    "true": True,
    "false": False,
    "NaN": float("nan"),
    "Infinity": float("inf"),
    "-Infinity": float("-inf"),
}
ESCAPES = {'"': '"', "'": "'", "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
WORD = re.compile(r"[^\s,:\[\]{}]+")
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


class Parser:
    """What both dialects share: the text, the positions, the depth guard."""

    def __init__(self, text: str, dialect: Dialect):
        self.text = text
        self.doc = Document(text, dialect)
        self.depth = 0
        self.values = 0

    def wrong(self, message: str, start: int, end: int | None = None) -> SyntaxProblem:
        start = min(start, len(self.text))
        return SyntaxProblem(
            message, self.doc.lines.span(start, min(start + 1, len(self.text)) if end is None else end)
        )

    def deeper(self, at: int) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.wrong(f"nested more than {MAX_DEPTH} levels deep", at)

    def count(self, at: int) -> None:
        self.values += 1
        if self.values > MAX_VALUES:
            raise self.wrong(f"more than {MAX_VALUES} values; this is no configuration", at)

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

    def skip(self, at: int) -> int:
        """The place of the next character that is neither space nor comment: each dialect has its own."""
        raise NotImplementedError

    def past_colon(self, at: int, key: str) -> int:
        """Where the key's value begins."""
        end = self.skip(at)
        if self.text[end : end + 1] != ":":
            raise self.wrong(f"a colon is expected after the key {shape(key)}, but here is {self.found(end)}", end)
        return self.skip(end + 1)


_JSON_SPACE = re.compile(r"[ \t\n\r]*")
_JSON_NUMBER = re.compile(r"(-?(?:0|[1-9]\d*))(\.\d+)?([eE][-+]?\d+)?", re.ASCII)
_JSON_TEXT = re.compile(r'[^"\\\x00-\x1f]*')
_JSON_WORD = re.compile("|".join(WORDS))


class JsonParser(Parser):
    """Strict JSON, as Python's json takes it: NaN and the infinities pass, a BOM does not."""

    def document(self) -> Document:
        if self.text.startswith(BOM):
            raise self.wrong(
                "the file starts with a byte-order mark, which strict JSON refuses; save it without one", 0
            )
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
        self.count(at)
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
            return WORDS[match[0]], match.end()
        if match := _JSON_NUMBER.match(self.text, at):
            whole, fraction, exponent = match.groups()
            value = float(match[0]) if fraction or exponent else self.whole(whole, at)
            return value, match.end()
        if self.text.startswith(("#", "//", "/*"), at):
            raise self.wrong("a comment, which strict JSON refuses", at)
        if word := WORD.match(self.text, at):
            hint = f"; write {PYTHON_WORDS[word[0]]}" if word[0] in PYTHON_WORDS else ""
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
            elif escaped in ESCAPES and escaped not in ("'", ""):
                parts.append(ESCAPES[escaped])
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
                into[key], end = self.value(self.past_colon(end, key), inner)
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
