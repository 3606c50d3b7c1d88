"""What earlier releases of DeepSpeed made of each key, as schemas/releases.json holds it. Loaded only where one is asked for.

tests/oracle/ask_releases.py asks the real releases and writes the file. A release that was not asked counts as the nearest
below it that was. `schema_at` lays what a release does over the schema, in keywords of its own: x-later (the release from
which the key is read), x-gone (the one from which it is not, or is refused).
"""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsplan.schemas.known_keys import Node, newest_schema
from dsplan.schemas.positions import steps
from dsplan.schemas.problem import Problem

NEWEST = "0.19.8"
"""The release that ds_config.schema.json and the rules speak of."""


@dataclass(frozen=True, slots=True)
class Upgrade:
    """From one release that was asked to another."""

    before: str
    after: str


@functools.cache
def _data() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(Path(__file__).with_name("releases.json").read_text("utf-8"))
    return loaded


@functools.cache
def asked() -> tuple[str, ...]:
    """The releases that answered, oldest first."""
    return tuple(row["release"] for row in _data()["releases"] if row["how"] == "asked")


def order(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split("."))


def nearest(version: str) -> str:
    """The newest release that was asked and is not after that version. Problem where there is none, or it is no version.

    0.14.5; 0.14.5+cu121 and 0.14.5.dev3 (the numbers count); 0.14 or 0.14.x (the last of that line).
    """
    told = re.fullmatch(r"\s*v?(\d{1,6})\.(\d{1,6})(?:\.(?:(\d{1,6})|[x*])(?:[.+-]?[a-z].*|\+.*)?)?\s*", version, re.I)
    if told is None:
        raise Problem(
            f"{version!r} is no release of DeepSpeed; write one as 0.14.5, or 0.14.x for the last of its line"
        )
    wanted = (int(told[1]), int(told[2]), int(told[3]) if told[3] else 1 << 20)
    below = [release for release in asked() if order(release) <= wanted]
    if not below:
        raise Problem(f"DeepSpeed {version} is older than all that is known; the oldest release here is {asked()[0]}")
    return below[-1]


def holds(changes: Mapping[str, Any], release: str, default: Any = None) -> Any:
    """What holds at that release, of values that each stand at the first release from which they hold."""
    value = default
    for first, entry in changes.items():
        if order(first) <= order(release):
            value = entry
    return value


def changes_of(pointer: str) -> Mapping[str, Mapping[str, Any]]:
    """status (read, ignored, refused), default and unknown (members: ignored, refused) of a key, each by release."""
    found: Mapping[str, Mapping[str, Any]] = _data()["keys"].get(pointer, {})
    return found


def changed_keys() -> tuple[str, ...]:
    return tuple(_data()["keys"])


@functools.cache
def schema_at(release: str) -> Node:
    """The schema as that release of DeepSpeed has it."""
    schema = copy.deepcopy(newest_schema())
    for pointer, changes in _data()["keys"].items():
        block = _node(schema, pointer.rpartition("/")[0])
        if block is None:
            continue
        name = steps(pointer)[-1]
        node = block.get("properties", {}).get(name)
        if "status" in changes:
            node = _with_status(node, changes["status"], release)
        if node is None:
            continue
        if "default" in changes:
            _set_default(node, holds(changes["default"], release, next(iter(changes["default"].values()))))
        if "values" in changes:
            _only(node, holds(changes["values"], release), holds(changes["values"], NEWEST, []))
        if "unknown" in changes:
            node["x-unknown"] = holds(changes["unknown"], release, node.get("x-unknown"))
        block.setdefault("properties", {})[name] = node
    for pointer, known in (("/optimizer/type", "optimizers"), ("/scheduler/type", "schedules")):
        names = _node(schema, pointer)["x-names"]  # type: ignore[index]
        listed = set(map(str.lower, holds(_data()[known], release)))
        every = [*names["deepspeed"], *names.get("removed", ())]
        names["deepspeed"] = [name for name in every if name.lower() in listed]
        if "removed" in names:
            names["removed"] = [name for name in names["removed"] if name.lower() not in listed]
    if holds(_data()["warmup_num_steps 0"], release) == "taken":
        warmup = _node(schema, "/scheduler/params/warmup_num_steps")
        assert warmup is not None
        del warmup["exclusiveMinimum"], warmup["x-exact"]
        warmup["minimum"] = 0
    return schema


def _node(schema: Node, pointer: str) -> Node | None:
    """The node itself, to be changed; None below an alias, which shares the nodes of another."""
    node: Node = schema
    for step in steps(pointer):
        found = node.get("properties", {}).get(step)
        if found is None:
            return None
        node = found
    return node


def _with_status(node: Node | None, changes: Mapping[str, str], release: str) -> Node | None:
    """The node as that release has the key; None where it still is no key."""
    status, newest = holds(changes, release), holds(changes, NEWEST)
    later = [first for first in changes if order(first) > order(release)]
    comes = next((first for first in later if changes[first] == "read"), None)
    if status not in ("read", None) and comes:
        kept = {key: value for key, value in (node or {}).items() if key != "x-removed"}
        return {"description": "A key of later releases.", **kept, "x-later": comes}
    if status in (newest, None):
        return node
    if status == "read":
        kept = {key: value for key, value in (node or {}).items() if key not in ("x-removed", "x-unread", "x-use")}
        description = str(kept.get("description", "A key of earlier releases.")).removeprefix("Removed: ")
        return {
            **kept,
            "description": description,
            "x-gone": next(first for first in later if changes[first] != "read"),
        }
    if node is None or status == "refused":
        return node
    idle = {key: value for key, value in node.items() if key not in ("x-removed", "x-use")}
    return {**idle, "x-unread": True, "x-gone": next(first for first in later if changes[first] == "refused")}


def _only(node: Node, taken: list[Any] | None, newest: list[Any]) -> None:
    """Takes out of the node's values those that the release does not take, and the newest does."""
    lost = [value for value in newest if value not in taken] if taken is not None else []
    if "enum" in node:
        node["enum"] = [value for value in node["enum"] if value not in lost]
    if None in lost and isinstance(node.get("type"), list):
        node["type"] = [kind for kind in node["type"] if kind != "null"]


def _set_default(node: Node, value: Any) -> None:
    node.pop("x-absent", None)
    if value is None:
        node.pop("default", None)
    else:
        node["default"] = value


def default_at(pointer: str, release: str) -> Any:
    """The default there at that release; of a key that came later the first that it had, since what is new comes switched off."""
    changes = changes_of(pointer).get("default", {})
    return holds(changes, release, next(iter(changes.values()), None))


def status_at(pointer: str, release: str) -> str | None:
    """read, ignored or refused; None where the key is the same in all releases. A key counts as its block does, where that is not read."""
    block = pointer.rpartition("/")[0]
    around = status_at(block, release) if block else None
    if around not in ("read", None):
        return around
    changes = changes_of(pointer).get("status")
    return holds(changes, release, next(iter(changes.values()))) if changes else None
