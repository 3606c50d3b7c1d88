"""Reads a configuration file and keeps where each key and value stands.

Two dialects. "json": what Python's json module takes (HF Trainer and Accelerate read so). "hjson": what the hjson package
takes (DeepSpeed reads so): comments, unquoted keys, single quotes, ''' multiline ''', trailing and missing commas, missing
outer braces, a byte-order mark, and words without quotes, which swallow the rest of their line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

from dsplan.schemas.hjson_parser import HjsonParser
from dsplan.schemas.json_parser import JsonParser
from dsplan.schemas.positions import Dialect, Document, Duplicate, SyntaxProblem, escape, shape, steps
from dsplan.schemas.problem import Problem

__all__ = [
    "Dialect",
    "Document",
    "Duplicate",
    "SyntaxProblem",
    "decode",
    "escape",
    "load_config_file",
    "read_document",
    "read_text",
    "read_whole",
    "shape",
    "steps",
]


def read_document(text: str, dialect: Dialect) -> Document:
    """The text with its positions. SyntaxProblem where it is not of the dialect."""
    return (HjsonParser if dialect == "hjson" else JsonParser)(text, dialect).document()


def read_text(path: str | Path) -> str:
    """The file's text. Problem where it cannot be had: missing, unreadable, a folder, not UTF-8."""
    try:
        with Path(path).open("rb") as file:
            content = read_whole(file, str(path))
    except OSError as error:
        raise Problem(f"{path}: cannot be read ({error.strerror or error})") from error
    except ValueError as error:  # a NUL in the name
        raise Problem(f"{str(path)!r} is no file name ({error})") from error
    return decode(content, str(path))


MOST_BYTES = 100_000_000
"""More is no configuration; a device such as /dev/zero never ends."""


def read_whole(file: BinaryIO, name: str) -> bytes:
    """All that the file holds. Problem where it is too much."""
    content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise Problem(f"{name}: holds more than {MOST_BYTES // 1_000_000} MB; this is no configuration")
    return content


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
