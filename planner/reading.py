"""A source as its reader reads it: who that is, the document with its positions, or where the syntax breaks."""

from __future__ import annotations

from dataclasses import dataclass

from dsplan.planner.rules.known_keys import members
from dsplan.planner.sources import Source
from dsplan.schemas.config import AUTO
from dsplan.schemas.finding import READERS, Reader
from dsplan.schemas.jsonfile import read_document
from dsplan.schemas.positions import Dialect, Document, SyntaxProblem
from dsplan.schemas.templates import MARK, holes, is_template, masked


@dataclass(frozen=True, slots=True)
class Reading:
    """document is None where the text cannot be read: syntax says why.

    elsewhere: why the readers of strict JSON could not read a text that DeepSpeed can, where the reader was not named.
    """

    read_as: Reader
    document: Document | None
    syntax: SyntaxProblem | None = None
    elsewhere: SyntaxProblem | None = None


def read(source: Source, reader: str, companion_kind: str | None = None) -> Reading:
    """reader "auto": Accelerate or the Trainer where the companion is theirs or the file has an "auto" they fill; else DeepSpeed."""
    wanted: Reader | None = next((name for name in READERS if name == reader), None)
    by_companion: Reader | None = None
    if companion_kind is not None:
        by_companion = "accelerate" if companion_kind == "accelerate" else "trainer"
    if source.embedded is not None:
        if isinstance(source.embedded, SyntaxProblem):
            return Reading(wanted or by_companion or "deepspeed", None, source.embedded)
        _note_texts(source.embedded)
        return Reading(wanted or by_companion or filling_reader(source.embedded) or "deepspeed", source.embedded)
    if wanted is not None:
        return _read(source.text, wanted)
    strict = _read(source.text, by_companion or "trainer")
    if strict.document is not None and not strict.document.duplicates:
        told = by_companion or filling_reader(strict.document)
        if told is not None:
            return Reading(told, strict.document)
    elif strict.document is not None and filling_reader(strict.document) is not None:
        return Reading(filling_reader(strict.document) or "trainer", strict.document)
    if by_companion is not None:
        return strict
    loose = _read(source.text, "deepspeed")
    return Reading("deepspeed", loose.document, loose.syntax, strict.syntax if loose.document is not None else None)


def _read(text: str, reader: Reader) -> Reading:
    dialect: Dialect = "hjson" if reader == "deepspeed" else "json"
    if not is_template(text):
        return _parsed(text, dialect, reader)
    hidden, written = masked(text)
    reading = _parsed(hidden, dialect, reader)
    document = reading.document
    if document is None:
        syntax = reading.syntax
        assert syntax is not None
        plain = _parsed(text, dialect, reader)
        if plain.document is not None or "{%" not in text:
            return plain
        said = f"{syntax.message} once the template's {{% %}} are taken out; render it first, and lint what comes of it"
        return Reading(reader, None, SyntaxProblem(said, syntax.span))
    document.text = document.lines.text = text
    for pointer, (start, _) in document.values_at.items():
        if start in written:
            document.open[pointer] = written[start]
    _drop_open_keys(document)
    _note_texts(document)
    return reading


def _parsed(text: str, dialect: Dialect, reader: Reader) -> Reading:
    try:
        return Reading(reader, read_document(text, dialect))
    except SyntaxProblem as syntax:
        return Reading(reader, None, syntax)


def _drop_open_keys(document: Document) -> None:
    """Members whose key is a placeholder: which key that is nobody knows."""
    for pointer in [pointer for pointer in document.keys_at if pointer.rpartition("/")[2].startswith(MARK)]:
        path, _, name = pointer.rpartition("/")
        block = document.at(path)
        if isinstance(block, dict):
            block.pop(name, None)
        for table in (document.keys_at, document.values_at, document.open):
            for inner in [inner for inner in table if inner == pointer or inner.startswith(f"{pointer}/")]:
                del table[inner]  # type: ignore[attr-defined]


def _note_texts(document: Document) -> None:
    """Quoted texts with a placeholder in them are open too."""
    if "${" in document.text or "{{" in document.text:
        for pointer, value in document.walk():
            if isinstance(value, str) and holes(value):
                document.open.setdefault(pointer, value)


def filling_reader(document: Document) -> Reader | None:
    """Who fills the "auto" values of the document: the HF Trainer, Accelerate where only it does, or nobody."""
    fillers = {
        (member.node or {}).get("x-auto")
        for member in members(document)
        if isinstance(member.value, str) and member.value == AUTO
    } - {None}
    if not fillers:
        return None
    return "accelerate" if "accelerate" in fillers and "zero_optimization" in document.value else "trainer"
