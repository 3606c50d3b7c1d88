"""The parser of hjson, with positions."""

from __future__ import annotations

import re
from typing import Any

from dsplan.schemas.json_parser import ESCAPES, PYTHON_WORDS, WORD, WORDS, Parser
from dsplan.schemas.positions import BOM, Dialect, Document, SyntaxProblem, shape

_HJSON_SPACE = " \t\n\r"
_HJSON_SKIPPED = re.compile(r"[ \t\n\r]+|(?:#|//)[^\r\n]*")
_HJSON_KEY = re.compile(r"[^:{}\[\], \t\n\r]*")
_HJSON_NUMBER = re.compile(r"[\t ]*(-?(?:0|[1-9]\d*))(\.\d+)?([eE][-+]?\d+)?[\t ]*")
_HJSON_TEXT = re.compile(r"[^'\"\\\x00-\x1f]*")
_HJSON_WORD = re.compile(r"[^\r\n,}\]#/]*(?:/(?![/*])[^\r\n,}\]#/]*)*")
_HJSON_LINE_END = re.compile(r"[\r\n]|$(?![\s\S])")
_INDENT = re.compile(r"[ \t\r]*")


class _Fatal(SyntaxProblem):
    """hjson gives up here, and does not try the text as a single value."""


class HjsonParser(Parser):
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
                self.depth = self.values = 0
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
            if text[at] in _HJSON_SPACE or text[at] == "#" or text.startswith("//", at):
                skipped = _HJSON_SKIPPED.match(text, at)
                assert skipped
                at = skipped.end()
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
            word = WORD.match(text)
            meant = PYTHON_WORDS.get(word[0]) if word else None
            remedy = f"write {meant}" if meant else "put it in quotes, or the rest on a line of its own"
            return self.wrong(
                f"{what}, since a word without quotes takes the rest of its line as text: {shape(text)}; {remedy}",
                start,
                end,
            )
        return self.wrong(what, at)

    def value(self, at: int, pointer: str) -> tuple[Any, int]:
        self.count(at)
        char = self.text[at : at + 1]
        value: Any
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
        self.doc.values_at[pointer] = (at, at + len(self.text[at:end].rstrip()))
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
                if escaped not in ESCAPES:
                    raise self.wrong(f"\\{escaped} is no escape", end, min(end + 2, len(self.text)))
                parts.append(ESCAPES[escaped])
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
        first = _HJSON_WORD.match(text, at)
        assert first
        stop = first.end()
        word = text[at:stop].strip()
        if word in ("null", "true", "false") and text[at] == word[0]:
            return WORDS[word], stop
        if text[at] == "-" or "0" <= text[at] <= "9":
            number = _HJSON_NUMBER.match(text, at)
            if number and number.end() == stop:
                return self.number(number, at), stop
        line_end = _HJSON_LINE_END.search(text, stop)
        assert line_end
        end = line_end.start()
        word = text[at:end].strip()
        if any(char in word for char in ",}]"):
            self.swallowed = (at, end)
        return word, end

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
        plain = _HJSON_KEY.match(text, at)
        assert plain
        end, space = plain.end(), -1
        while True:
            char = text[end : end + 1]
            if char == "":
                raise self.unfinished(
                    "an object without its closing brace" if end == at else "a key without a value", at
                )
            if char == ":":
                if end == at:
                    raise self.wrong("a colon without a key before it", at)
                if space >= 0 and space != end - 1:
                    raise self.wrong("a key with a space in it needs quotes", at, end)
                return text[at:end].rstrip() if space >= 0 else text[at:end], end
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
                into[key], end = self.value(self.past_colon(end, key), inner)
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
