"""A source as its reader reads it: who that is, the document with its positions, or where the syntax breaks."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dsplan.planner.rules.known_keys import members
from dsplan.schemas.config import AUTO
from dsplan.schemas.finding import READERS, Reader
from dsplan.schemas.jinja import has_blocks, renderings
from dsplan.schemas.jsonfile import read_document
from dsplan.schemas.positions import BOM, Dialect, Document, Lines, SyntaxProblem, steps
from dsplan.schemas.templates import MARK, holes, is_template, masked

if TYPE_CHECKING:
    from dsplan.planner.auditing.sources import Source


@dataclass(frozen=True, slots=True)
class Reading:
    """document is None where the text cannot be read: syntax says why.

    others: what a template's other branches make of it. broken: why one of them cannot be read. guessed: nobody named the reader. elsewhere: why the readers of strict JSON could not read what DeepSpeed can.
    """

    read_as: Reader
    document: Document | None
    syntax: SyntaxProblem | None = None
    others: tuple[Document, ...] = ()
    broken: SyntaxProblem | None = None
    guessed: bool = False
    elsewhere: SyntaxProblem | None = None


def read(source: Source, reader: str, companion_kind: str | None = None) -> Reading:
    """reader "auto": Accelerate or the Trainer where the companion is theirs or the file has an "auto" they fill; else DeepSpeed."""
    named: Reader | None = next((name for name in READERS if name == reader), None)
    beside: Reader | None = None
    if companion_kind is not None:
        beside = "accelerate" if companion_kind == "accelerate" else "trainer"
    if isinstance(source.embedded, SyntaxProblem):
        return Reading(named or beside or "deepspeed", None, source.embedded)
    if source.embedded is not None:
        _note_texts(source.embedded)
        by_file = filling_reader(source.embedded)
        return Reading(named or beside or by_file or "deepspeed", source.embedded, guessed=not (named or beside))
    if named or beside:
        return _read(source.text, named or beside or "deepspeed")
    strict = _read(source.text, "trainer")
    if strict.document is not None:
        by_file = filling_reader(strict.document)
        if by_file is not None:
            return replace(strict, read_as=by_file, guessed=True)
    loose = _read(source.text, "deepspeed")
    return replace(loose, guessed=True, elsewhere=strict.syntax if loose.document is not None else None)


def _read(text: str, reader: Reader) -> Reading:
    dialect: Dialect = "hjson" if reader == "deepspeed" else "json"
    if not is_template(text):
        return _parsed(text, dialect, reader)
    tried = [_rendered(rendering, text, dialect, reader) for rendering in renderings(text)]
    readable = [reading for reading in tried if reading.document is not None]
    if readable:
        broken = next((_told(one.syntax) for one in tried if one.syntax is not None), None)
        others = tuple(one.document for one in readable[1:] if one.document is not None)
        return replace(readable[0], others=others, broken=broken)
    plain = _parsed(text, dialect, reader)
    if plain.document is not None or not has_blocks(text):
        return plain
    syntax = tried[0].syntax
    assert syntax is not None
    said = (
        f"{_told(syntax).message} once the template's {{% %}} are taken out; render it first, and lint what comes of it"
    )
    return Reading(reader, None, SyntaxProblem(said, syntax.span))


def _told(syntax: SyntaxProblem) -> SyntaxProblem:
    """Without the MARKs that stand for placeholders."""
    return SyntaxProblem(re.sub(f'"?{MARK}+(\\.\\.\\.)?"?', "a placeholder", syntax.message), syntax.span)


def _rendered(rendering: str, text: str, dialect: Dialect, reader: Reader) -> Reading:
    """One rendering of the text, its placeholders noted as open values."""
    hidden, written, members = masked(rendering)
    reading = _parsed(hidden, dialect, reader)
    document = reading.document
    if document is not None:
        document.text = document.lines.text = text
        for pointer, (start, _) in document.values_at.items():
            if start in written:
                document.open[pointer] = written[start]
        _drop_open_keys(document)
        _note_texts(document)
        for at, member in members.items():
            around = [
                (end - start, pointer) for pointer, (start, end) in document.values_at.items() if start <= at < end
            ]
            block = min(around, default=(0, ""))[1]
            if isinstance(document.at(block), dict):
                document.more.setdefault(block, member)
    return reading


def _parsed(text: str, dialect: Dialect, reader: Reader) -> Reading:
    """What stands behind a byte-order mark is read for strict JSON too: a rule speaks of the mark, the others of the rest."""
    marked = dialect == "json" and text.startswith(BOM) and not text.startswith(2 * BOM) and len(text) > 1
    try:
        document = read_document(" " + text[1:] if marked else text, dialect)
    except SyntaxProblem as syntax:
        return Reading(reader, None, syntax)
    if marked:
        document.text, document.lines = text, Lines(text)
    return Reading(reader, document)


def _drop_open_keys(document: Document) -> None:
    """Members whose key is a placeholder: which key that is nobody knows."""
    keys = [(pointer, steps(pointer)[-1]) for pointer in document.keys_at]
    for pointer in [pointer for pointer, name in keys if name.startswith(MARK) or holes(name)]:
        if pointer not in document.keys_at:  # inside one that is gone
            continue
        path, name = pointer.rpartition("/")[0], steps(pointer)[-1]
        block = document.at(path)
        start, end = document.keys_at[pointer]
        document.more.setdefault(path, document.text[start:end])
        if isinstance(block, dict):
            block.pop(name, None)
        for table in (document.keys_at, document.values_at, document.open):
            for inner in [inner for inner in table if inner == pointer or inner.startswith(f"{pointer}/")]:
                del table[inner]


def _note_texts(document: Document) -> None:
    """Quoted texts with a placeholder in them are open too."""
    if "$" in document.text or "{{" in document.text:
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
