"""The keys that DeepSpeed knows, read from schemas/ds_config.schema.json. No rule keeps a list of its own.

Beside the standard keywords that file has: x-unknown (what a block does with a member that it does not know: refused,
ignored, or passed on as an argument), x-late (an untyped key whose wrong value raises later), x-auto (who fills "auto"),
x-auto-decides (a wrong guess changes what is trained), x-stages (ZeRO stages that read the key), x-dead (nothing reads
it), x-unread (a name that people write and DeepSpeed never had), x-use (what to write instead), x-removed, x-alias-of,
x-any-case, x-exact (2.0 is no integer here), x-names, x-takes and x-needs (types and their arguments), x-absent (what
holds where the key is absent), x-known-as, x-near (how bad a misspelt member is).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Any

from dsplan.schemas.positions import Document, escape, steps

Node = dict[str, Any]


@functools.cache
def schema() -> Node:
    text = resources.files("dsplan.schemas").joinpath("ds_config.schema.json").read_text("utf-8")
    loaded: Node = json.loads(text)
    return loaded


def resolved(node: Node) -> Node:
    """The node with what its $ref names laid under it."""
    if "$ref" not in node:
        return node
    target: Any = schema()
    for step in node["$ref"].lstrip("#/").split("/"):
        target = target[step]
    return {**resolved(target), **node}


def child(block: Node | None, name: str) -> Node | None:
    """What the schema says of that member; None where it does not know it."""
    if block is None:
        return None
    found = block.get("properties", {}).get(name)
    if found is None and isinstance(block.get("additionalProperties"), dict):
        found = block["additionalProperties"]
    return resolved(found) if found is not None else None


def lookup(pointer: str) -> Node | None:
    """The node of a pointer into a configuration."""
    node: Node | None = schema()
    for step in steps(pointer):
        node = resolved(node["items"]) if node and "items" in node else child(node, step)
    return node


@functools.cache
def blocks_of() -> dict[str, tuple[str, ...]]:
    """Each key that DeepSpeed reads to the blocks that hold it, as pointers."""
    table: dict[str, list[str]] = {}

    def visit(node: Node, pointer: str) -> None:
        for name, member in node.get("properties", {}).items():
            if not ({"x-unread", "x-removed", "x-alias-of", "$ref"} & member.keys()) and pointer != "/dsplan":
                table.setdefault(name, []).append(pointer)
            visit(member, f"{pointer}/{escape(name)}")

    visit(schema(), "")
    return {name: tuple(pointers) for name, pointers in table.items()}


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


def members(document: Document) -> Iterator[Member]:
    """Every member of every block that is known, parents first. What is removed or not read is not entered."""
    waiting: list[tuple[str, Any, Node]] = [("", document.value, schema())]
    while waiting:
        pointer, value, node = waiting.pop(0)
        if isinstance(value, list) and "items" in node:
            waiting += [(f"{pointer}/{index}", entry, resolved(node["items"])) for index, entry in enumerate(value)]
        if not isinstance(value, dict) or "x-unknown" not in node:
            continue
        for name, entry in value.items():
            inner = f"{pointer}/{escape(name)}"
            known = child(node, name)
            yield Member(inner, name, entry, known, node, pointer)
            if known is not None and not ({"x-removed", "x-unread"} & known.keys()) and not shadowed(document, inner):
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
