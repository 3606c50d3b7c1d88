"""What is wrong with one value, judged as DeepSpeed judges it. Exactly one fault, so that exactly one rule speaks."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from dsplan.planner.rules.known_keys import CLOSED, Member, members, shadowed
from dsplan.schemas.positions import Document, shape

if TYPE_CHECKING:
    from dsplan.schemas.finding import Moment
    from dsplan.schemas.known_keys import Node

Kind = Literal["swallowed", "auto", "flag", "text-for-boolean", "type", "range"]
AUTO = "auto"
_TRUE = {"1", "on", "t", "true", "y", "yes"}
_FALSE = {"0", "off", "f", "false", "n", "no"}
_WHOLE = re.compile(r"\s*[+-]?\d+(_\d+)*(\.0*)?\s*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Fault:
    """must: what the value must be, as a noun phrase."""

    kind: Kind
    must: str = ""


def fault(member: Member, document: Document) -> Fault | None:
    """The fault of a member of the document; None where its key is unknown, or DeepSpeed takes the value as it is meant."""
    return _faults(document).get(member.pointer)


@lru_cache(maxsize=2)
def _faults(document: Document) -> dict[str, Fault]:
    found = ((member.pointer, _fault(member, document)) for member in members(document))
    return {pointer: fault for pointer, fault in found if fault}


def _fault(member: Member, document: Document) -> Fault | None:
    node, value = member.node, member.value
    if node is None or CLOSED & node.keys() or "type" not in node:
        return None
    if shadowed(document, member.pointer):
        return None
    if swallowed(document, member.pointer):
        return Fault("swallowed")
    types = _types(node)
    if value == AUTO and isinstance(value, str) and not _block(node):
        if _own_auto(node):
            return None
        if "x-auto" in node or member.strict or "string" not in types or "enum" in node:
            return Fault("auto")
    if _block(node) and not isinstance(value, dict):
        if value == AUTO and member.strict:
            return Fault("auto")
        return None if _is(value, types, exact=True) else Fault("flag", expected(node))
    if not member.strict and types == ["boolean"] and isinstance(value, str):
        return Fault("text-for-boolean")
    taken = _taken(value, types, member)
    if taken is _REFUSED:
        return Fault("type", expected(node))
    if isinstance(taken, float) and not math.isfinite(taken):
        return Fault("range", "finite")
    if not _allowed(taken, node):
        return Fault("range", expected(node))
    if isinstance(taken, list) and "items" in node and not all(_is_item(entry, node["items"]) for entry in taken):
        return Fault("type", f"a list whose entries are each {expected(node['items'])}")
    return None


def _is_item(value: Any, node: Node) -> bool:
    if "enum" in node:
        return any(value == known for known in node["enum"])
    return "type" not in node or _is(value, _types(node), exact=True)


def moment(member: Member, kind: Kind, document: Document) -> Moment | Literal["never"]:
    """When DeepSpeed raises on a value with that fault."""
    node = member.node or {}
    late: Moment | Literal["never"] = node.get("x-late", "never")
    if member.strict and "x-parses" not in node:
        return "never" if kind == "auto" else late if kind == "range" and late != "never" else "parse"
    if kind != "range" and any(_passes(member.value, what) for what in node.get("x-parses", ())):
        return "never"
    if "x-when" in node and not document.at(node["x-when"]):
        return "never"
    return "parse" if kind == "flag" else late


def _passes(value: Any, what: str) -> bool:
    """The value is of that sort: a type of JSON, or one of the words of x-parses (schemas/known_keys.py)."""
    if what == "digits":
        return isinstance(value, str) and _WHOLE.fullmatch(value) is not None and "." not in value
    if what == "positive":
        return isinstance(value, (int, float)) and value > 0
    words = {"any": True, "true": value is True, "empty": not value, "filled": bool(value), AUTO: value == AUTO}
    return words[what] if what in words else _is(value, [what], exact=True)


def counts_as_number(member: Member, document: Document) -> bool:
    """true (or false) at the top level, where a number is meant and DeepSpeed counts with it as 1 (or 0)."""
    if not isinstance(member.value, bool) or member.block_pointer or member.node is None:
        return False
    numeric = {"integer", "number"} & set(_types(member.node)) and "boolean" not in _types(member.node)
    return bool(numeric) and "x-parses" in member.node and moment(member, "type", document) == "never"


def swallowed(document: Document, pointer: str) -> bool:
    """A word without quotes that took the comma (or a brace) at its line's end with it."""
    value = document.at(pointer)
    if document.dialect != "hjson" or not isinstance(value, str) or pointer not in document.values_at:
        return False
    raw = document.raw(pointer)
    return bool(raw) and raw[0] not in "\"'" and raw[-1] in ",}]"


def expected(node: Node) -> str:
    """What the schema allows there, in words."""
    types = _types(node)
    if "enum" in node:
        own = [value for value in node["enum"] if value is not None and (value != AUTO or "x-auto" not in node)]
        words = [shape(value) if not isinstance(value, str) else value for value in own]
        text = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
        if own == [AUTO]:  # "auto" is dropped, and whatever else there is refused
            text = "absent"
    elif _block(node):
        names = node.get("properties", {})
        text = 'an object like {"enabled": true}' if "enabled" in names else "an object"
    else:
        words = [
            _WORDS[name] for name in types if name not in ("null",) and not (name == "string" and _auto_only(node))
        ]
        text = " or ".join(words) + _bounds(node)
        if node.get("minLength"):
            text += " that is not empty"
        if _own_auto(node):
            text += ' or "auto"'
    return text + (" or null" if "null" in types and text != "null" else "")


_WORDS = {
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "string": "a text",
    "array": "a list",
    "object": "an object",
}


def _bounds(node: Node) -> str:
    low, above = node.get("minimum"), node.get("exclusiveMinimum")
    high, below = node.get("maximum"), node.get("exclusiveMaximum")
    if low is not None and high is not None:
        return f" from {low:g} to {high:g}"
    if above is not None and below is not None:
        return f" above {above:g} and below {below:g}"
    if above is not None and "integer" in _types(node) and above == int(above):
        return f" of at least {int(above) + 1}"
    if low is not None:
        return f" of at least {low:g}"
    return f" above {above:g}" if above is not None else ""


def _types(node: Node) -> list[str]:
    types = node.get("type", [])
    return [types] if isinstance(types, str) else list(types)


def _block(node: Node) -> bool:
    return "object" in _types(node)


def _auto_only(node: Node) -> bool:
    return bool(node.get("pattern") == "^auto$")


def _own_auto(node: Node) -> bool:
    """DeepSpeed itself gives "auto" a meaning here."""
    return "x-auto" not in node and (_auto_only(node) or AUTO in node.get("enum", ()) or node.get("default") == AUTO)


_REFUSED = object()


def _is(value: Any, types: list[str], *, exact: bool) -> bool:
    """JSON's own types. A float that is whole is an integer too, unless exact."""
    if value is None:
        return "null" in types
    if isinstance(value, bool):
        return "boolean" in types
    if isinstance(value, int):
        return "integer" in types or "number" in types
    if isinstance(value, float):
        whole = math.isfinite(value) and value.is_integer() and not exact
        return "number" in types or ("integer" in types and whole)
    if isinstance(value, str):
        return "string" in types
    return ("array" if isinstance(value, list) else "object") in types


def _taken(value: Any, types: list[str], member: Member) -> Any:
    """The value as DeepSpeed takes it, or _REFUSED."""
    node = member.node or {}
    auto_only = _auto_only(node)
    own = [entry for entry in node.get("enum", ()) if entry != AUTO or "x-auto" not in node]
    numbers_only = bool(own) and not any(isinstance(entry, str) for entry in own)
    if isinstance(value, str) and (auto_only or numbers_only) and value != AUTO:
        types = [name for name in types if name != "string"]
        if auto_only and _own_auto(node):  # a text or a number in the model itself: "8" stays a text
            return _REFUSED
    if member.strict and isinstance(value, float) and abs(value) >= 2**63 and "number" not in types:
        return _REFUSED  # too large for the model's integers
    if _is(value, types, exact=bool(node.get("x-exact"))):
        return value
    if not member.strict:
        if value is None and not node.get("x-late"):
            return None  # as good as absent
        return value if types == ["boolean"] and value in (0, 1) and not isinstance(value, str) else _REFUSED
    return _coerced(value, types, member.name)


def held_value(value: Any, node: Node, name: str) -> Any:
    """What a strict block makes of a value that it takes: "2" is 2, 5e8 is 500000000, true is 1 where a number is meant."""
    types = _types(node)
    own = [entry for entry in node.get("enum", ()) if entry != AUTO]
    if _auto_only(node) or (own and not any(isinstance(entry, str) for entry in own)):
        types = [kind for kind in types if kind != "string"]
    taken = value if _is(value, types, exact=True) else _coerced(value, types, name)
    if isinstance(value, float) and "integer" in types and "number" not in types and value.is_integer():
        return int(value)
    return value if taken is _REFUSED else taken


def _coerced(value: Any, types: list[str], name: str) -> Any:
    """pydantic's lax mode, which the strict blocks use. Source: deepspeed/runtime/config_utils.py, DeepSpeedConfigModel."""
    if "boolean" in types:
        if isinstance(value, (int, float)) and value in (0, 1):
            return bool(value)
        if isinstance(value, str) and value.lower() in _TRUE | _FALSE:
            return value.lower() in _TRUE
    if "integer" in types or "number" in types:
        if isinstance(value, bool):
            return _REFUSED if name in ("loss_scale", "loss_scale_window", "min_loss_scale") else int(value)
        if isinstance(value, str) and "integer" in types and _WHOLE.fullmatch(value):
            if "." in value and name in ("loss_scale_window", "min_loss_scale"):  # int() looks at these first
                return _REFUSED
            digits = value.split(".")[0].strip().replace("_", "")
            return int(digits) if len(digits) < 300 else _REFUSED
        if isinstance(value, str) and "number" in types:
            try:
                return float(value)
            except ValueError:
                return _REFUSED
    if "array" in types and isinstance(value, str) and name in ("classes", "names", "name_suffixes"):
        return [value]
    return _REFUSED


def _allowed(value: Any, node: Node) -> bool:
    if "enum" in node:
        known = node["enum"]
        if isinstance(value, bool):
            value = int(value) if not any(isinstance(entry, bool) for entry in known) else value
        if isinstance(value, str) and node.get("x-any-case"):
            return value.lower() in [entry.lower() for entry in known if isinstance(entry, str)]
        return isinstance(value, (str, int, float, type(None))) and value in known
    if isinstance(value, str):
        return bool(len(value) >= node.get("minLength", 0))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return True
    return (
        not ("minimum" in node and value < node["minimum"])
        and not ("exclusiveMinimum" in node and value <= node["exclusiveMinimum"])
        and not ("maximum" in node and value > node["maximum"])
        and not ("exclusiveMaximum" in node and value >= node["exclusiveMaximum"])
    )
