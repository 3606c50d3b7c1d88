"""Every member of a configuration that is linted, beside what schemas/known_keys.py says of its key."""

from __future__ import annotations

import functools
import json
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dsplan.schemas.known_keys import Node, child, lookup, resolved, schema
from dsplan.schemas.positions import Document, escape, steps

if TYPE_CHECKING:
    from collections.abc import Iterator


def blocks_of() -> dict[str, tuple[str, ...]]:
    """Each key that DeepSpeed reads to the blocks that hold it, as pointers."""
    known = schema()
    if id(known) not in _BLOCKS:
        _BLOCKS[id(known)] = _blocks_of(known)
    return _BLOCKS[id(known)]


_BLOCKS: dict[int, dict[str, tuple[str, ...]]] = {}
"""By the id of a release's schema (each is kept)."""


def _blocks_of(known: Node) -> dict[str, tuple[str, ...]]:
    table: dict[str, list[str]] = {}

    def visit(node: Node, pointer: str) -> None:
        for name, member in node.get("properties", {}).items():
            if (
                not ({"x-unread", "x-removed", "x-later", "x-alias-of", "$ref"} & member.keys())
                and pointer != "/dsplan"
            ):
                table.setdefault(name, []).append(pointer)
            visit(member, f"{pointer}/{escape(name)}")

    visit(known, "")
    return {name: tuple(pointers) for name, pointers in table.items()}


CLOSED = frozenset(("x-removed", "x-unread", "x-later"))
"""Nothing in such a key is looked at."""


@dataclass(frozen=True, slots=True)
class Member:
    """One member of a block of the document. node is None where the block does not know it."""

    pointer: str
    name: str
    value: Any
    node: Node | None
    block: Node
    block_pointer: str

    @property
    def strict(self) -> bool:
        """The block is one whose members DeepSpeed checks (and coerces), and of which it drops "auto"."""
        return self.block.get("x-unknown") == "refused"


@functools.lru_cache(maxsize=2)
def members(document: Document) -> tuple[Member, ...]:
    """Every member of every block that is known, parents first. What is removed or not read is not entered."""
    return tuple(_members(document))


def _members(document: Document) -> Iterator[Member]:
    waiting = deque[tuple[str, Any, Node]]([("", document.value, schema())])
    while waiting:
        pointer, value, node = waiting.popleft()
        if isinstance(value, list) and "items" in node:
            waiting += [(f"{pointer}/{index}", entry, resolved(node["items"])) for index, entry in enumerate(value)]
        if not isinstance(value, dict) or "x-unknown" not in node:
            continue
        for name, entry in value.items():
            inner = f"{pointer}/{escape(name)}"
            known = child(node, name)
            yield Member(inner, name, entry, known, node, pointer)
            if known is not None and not (CLOSED & known.keys()) and not shadowed(document, inner):
                waiting.append((inner, entry, known))


def shadowed(document: Document, pointer: str) -> bool:
    """bfloat16 beside a bf16 that is there: not even looked at."""
    return pointer == "/bfloat16" and document.at("/bf16") is not None


def title(pointer: str) -> str:
    """A pointer as people write it: zero_optimization.stage."""
    return ".".join(steps(pointer))


def absent(pointer: str) -> str:
    """What holds where that key is not there, as a clause; empty where there is nothing to say."""
    node = lookup(pointer) or {}
    if "x-absent" in node:
        return str(node["x-absent"])
    if "default" in node and not isinstance(node["default"], list):
        return f"{title(pointer)} is {json.dumps(node['default'])}"
    if "properties" in node or "x-unknown" in node:
        return f"{title(pointer)} is not set"
    return f"{title(pointer)} is not set"
