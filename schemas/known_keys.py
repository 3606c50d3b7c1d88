"""The keys that DeepSpeed knows, as schemas/ds_config.schema.json holds them. Nothing keeps a list of its own.

Beside the standard keywords that file has: x-unknown (what a block does with a member that it does not know: refused,
ignored, or passed on as an argument), x-late (an untyped key whose wrong value raises: at parse, init or step),
x-parses (wrong values of such a key that pass the parser: types of JSON, true, positive numbers, empty, filled, digits, auto, any),
x-when (the parser looks at the key only where that one is set), x-auto (who fills "auto"),
x-auto-decides (a wrong guess changes what is trained), x-stages (ZeRO stages that read the key), x-dead (nothing reads
it), x-unread (a name that people write and DeepSpeed never had), x-use (what to write instead), x-removed, x-alias-of,
x-any-case, x-exact (2.0 is no integer here), x-names, x-takes and x-needs (types and their arguments), x-absent (what
holds where the key is absent), x-known-as, x-near (how bad a misspelt member is). The schema of an earlier release has
also x-later and x-gone (see releases.py).
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from dsplan.schemas.positions import escape, steps

Node = dict[str, Any]


_RELEASE: ContextVar[str | None] = ContextVar("release", default=None)


@contextmanager
def at_release(release: str | None) -> Iterator[None]:
    """Inside, the schema is that of an earlier release of DeepSpeed (one that was asked); None: the newest."""
    token = _RELEASE.set(release)
    try:
        yield
    finally:
        _RELEASE.reset(token)


def schema() -> Node:
    """Of the release that is spoken of."""
    release = _RELEASE.get()
    if release is None:
        return newest_schema()
    from dsplan.schemas.releases import schema_at

    return schema_at(release)


@functools.cache
def newest_schema() -> Node:
    text = Path(__file__).with_name("ds_config.schema.json").read_text("utf-8")
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


def unknown_keys(raw_config: Mapping[str, Any]) -> Iterator[tuple[str, bool, str]]:
    """(pointer, refused, text) for every key that DeepSpeed does not know, in file order.

    refused: its block is one in which DeepSpeed raises; the others have no effect. Arguments of an optimizer or a schedule
    are judged by its type, not here.
    """
    yield from _unknown(raw_config, schema(), "")


def _unknown(block: Mapping[str, Any], node: Node, pointer: str) -> Iterator[tuple[str, bool, str]]:
    for name, value in block.items():
        inner = f"{pointer}/{escape(str(name))}"
        known = child(node, str(name))
        if known is None or "x-unread" in known:
            if node.get("x-unknown") != "passed":
                strict = known is None and node.get("x-unknown") == "refused" and value != "auto"
                effect = "which it refuses" if strict else "has no effect"
                yield inner, strict, f"not a key of DeepSpeed, {effect}{_meant(str(name), known, node)}"
        elif isinstance(value, Mapping) and "x-unknown" in known and "x-removed" not in known:
            yield from _unknown(value, known, inner)


def _meant(name: str, known: Node | None, node: Node) -> str:
    if known is not None:
        return f"; write {'.'.join(steps(known['x-use']))}" if "x-use" in known else ""
    names = [key for key, member in node.get("properties", {}).items() if not {"x-removed", "x-unread"} & member.keys()]
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.8)
    return f'; did you mean "{near[0]}"?' if near else ""
