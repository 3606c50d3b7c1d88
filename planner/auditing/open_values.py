"""Open values: what a template or a program leaves to somebody else, tried with several values each.

What lint finds whatever the value is, it says; what depends on the value, it does not. So no rule has to know of them.
"""

from __future__ import annotations

import copy
import random
from typing import TYPE_CHECKING, Any

from dsplan.planner.rules.near_names import nearest
from dsplan.schemas.known_keys import Node, lookup, resolved
from dsplan.schemas.positions import Document, escape, steps
from dsplan.schemas.templates import filled, holes, names

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

FILLINGS = 12
"""Tries: each value of the longest list of candidates at least once, and pairs of them mixed."""
_ABSENT = object()
_NUMBERS = (1, 2, 8, 0.5, 16, 1e-3, 4096, 1_000_000_000, 0, 1e12)
_UNKNOWN: tuple[Any, ...] = (1, "x", True, 0.5, {}, [], _ABSENT)
"""For a place of which the schema knows nothing."""


def define(document: Document, defines: Mapping[str, str]) -> Document:
    """The document with the open values filled whose placeholders are all defined."""
    known = {at: text for at, text in document.open.items() if all(name in defines for name in names(text))}
    if not known:
        return document
    return _with(document, {at: filled(text, defines) for at, text in known.items()})


def open_names(document: Document) -> dict[str, str]:
    """What --define would fill, in the order of the text, each with the pointer where it first stands."""
    first: dict[str, str] = {}
    for pointer in sorted(document.open, key=lambda pointer: document.values_at[pointer]):
        for name in names(document.open[pointer]):
            first.setdefault(name, pointer)
    return first


def fillings(document: Document) -> Iterator[Document]:
    """The document with other values in its open places, and other members where some may be added; itself without such."""
    if not document.open and not document.more:
        yield document
        return
    candidates = {pointer: _candidates(document, pointer) for pointer in document.open}
    for turn in range(FILLINGS):
        chosen: dict[str, Any] = {}
        for pointer, values in candidates.items():
            draw = random.Random(f"{document.open[pointer]} {len(values)}")
            order = draw.sample(values, len(values))
            extra = random.Random(f"{turn} {document.open[pointer]} {len(values)}")
            chosen[pointer] = order[turn] if turn < len(order) else extra.choice(order)
        filled_in = _with(document, chosen)
        for pointer in document.more if turn else ():  # the first try adds nothing: its words are those that are told
            _add_members(filled_in, pointer, turn)
        yield filled_in


def _add_members(document: Document, pointer: str, turn: int) -> None:
    """Known members that the block lacks, about half of them, with values that are allowed."""
    block, node = document.at(pointer), lookup(pointer)
    if not isinstance(block, dict) or node is None:
        return
    draw = random.Random(f"{turn} {pointer}")
    place = document.values_at[pointer]
    document.values_at, document.keys_at = dict(document.values_at), dict(document.keys_at)

    def add(into: dict[str, Any], node: Node, pointer: str, share: float) -> None:
        properties = node.get("properties", {})
        meant = {nearest(name, properties) for name in into if name not in properties}  # it stands here, misspelt
        for name, member in properties.items():
            known = resolved(member)
            if name in into or name in meant or draw.random() > share or _OLD & known.keys():
                continue
            inner = f"{pointer}/{escape(name)}"
            into[name] = copy.deepcopy(draw.choice([value for value in _allowed(known) if value is not _ABSENT]))
            document.values_at[inner] = document.keys_at[inner] = place
            if isinstance(into[name], dict):
                add(into[name], known, inner, 0.5)

    add(block, node, pointer, 0.5)


_OLD = {"x-removed", "x-unread", "x-alias-of", "deprecated"}
"""Of keys that nobody would add."""


def _with(document: Document, values: Mapping[str, Any]) -> Document:
    new = copy.copy(document)
    new.value = copy.deepcopy(document.value)
    new.open = {pointer: text for pointer, text in document.open.items() if pointer not in values}
    for pointer, value in values.items():
        *path, last = steps(pointer) or [""]
        block = new.at("".join(f"/{escape(step)}" for step in path))
        if not pointer:
            new.value = {} if value is _ABSENT else value
        elif isinstance(block, dict):
            if value is _ABSENT:
                block.pop(last, None)
            else:
                block[last] = copy.deepcopy(value)
        elif isinstance(block, list) and value is not _ABSENT:
            block[int(last)] = copy.deepcopy(value)
    return new


def _candidates(document: Document, pointer: str) -> tuple[Any, ...]:
    text = document.open[pointer]
    if document.raw(pointer)[:1] in "\"'" and holes(text) != [text]:
        texts = _allowed(resolved(node)) if (node := lookup(pointer)) is not None else ()
        return (text, *(value for value in texts if isinstance(value, str) and value != text))  # a text, whatever comes
    node = lookup(pointer)
    return _allowed(resolved(node)) if node is not None else _UNKNOWN


def _allowed(node: Node) -> tuple[Any, ...]:
    """Some values of each type that the schema allows there."""
    if "enum" in node:
        return tuple(value for value in node["enum"] if value not in ("auto", None)) or _UNKNOWN
    types = node.get("type", ())
    types = [types] if isinstance(types, str) else types
    values: list[Any] = []
    if "boolean" in types:
        values += [True, False]
    if "integer" in types or "number" in types:
        low, high = node.get("minimum", -float("inf")), node.get("maximum", float("inf"))
        above, below = node.get("exclusiveMinimum", -float("inf")), node.get("exclusiveMaximum", float("inf"))
        values += [
            number
            for number in _NUMBERS
            if low <= number <= high and above < number < below and ("number" in types or number == int(number))
        ]
    if "string" in types and not values:
        values += ["x", "y/z"]
    if "array" in types:
        values += [[], [1, 1]]
    if "object" in types:
        values += [{}, _ABSENT]
    return tuple(int(v) if isinstance(v, float) and "number" not in types else v for v in values) or _UNKNOWN
