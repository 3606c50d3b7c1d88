"""Hypothesis strategies: valid DeepSpeed configurations of many blocks with one thing wrong in them."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers.config_parts import BATCHES, BLOCKS, PRECISIONS, ZEROS
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
SCHEMA: dict[str, Any] = json.loads((ROOT / "schemas" / "ds_config.schema.json").read_text("utf-8"))

WORLD_SIZES = (1, 2, 4, 8)
PARTS = {"batch": BATCHES, "precision": PRECISIONS, "zero": ZEROS, "block": BLOCKS}
_MISSING = object()


@dataclass(frozen=True)
class Mutant:
    """A valid configuration and what is done to it: a key goes, a value is put somewhere; either may be absent ("")."""

    parts: tuple[tuple[str, str], ...]
    world_size: int
    remove: str
    put: str
    value: Any

    @classmethod
    def of(cls, names: list[str], world_size: int, remove: str, put: str, value: Any) -> Mutant:
        """From the names of its parts: batch, precision, zero, and then blocks."""
        kinds = ["batch", "precision", "zero"] + ["block"] * (len(names) - 3)
        return cls(tuple(zip(kinds, names, strict=True)), world_size, remove, put, value)

    @property
    def base(self) -> dict[str, Any]:
        config: dict[str, Any] = {}
        for kind, name in self.parts:
            _merge(config, copy.deepcopy(PARTS[kind][name]))
        return config

    @property
    def config(self) -> dict[str, Any]:
        config = self.base
        if self.remove:
            _holder(config, self.remove).pop(_last(self.remove), None)
        if self.put:
            _holder(config, self.put)[_last(self.put)] = copy.deepcopy(self.value)
        return config


def _merge(into: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _last(pointer: str) -> str:
    return pointer.rpartition("/")[2]


def _holder(config: dict[str, Any], pointer: str) -> dict[str, Any]:
    """The block of the pointer's last key; blocks that are not there are made."""
    for step in pointer.split("/")[1:-1]:
        inner = config.setdefault(step, {})
        if not isinstance(inner, dict):
            inner = config[step] = {}
        config = inner
    return config


def _pointers(config: dict[str, Any], at: str = "") -> list[str]:
    found = []
    for key, value in config.items():
        found.append(f"{at}/{key}")
        if isinstance(value, dict):
            found += _pointers(value, f"{at}/{key}")
    return found


def _node(pointer: str) -> dict[str, Any]:
    node = SCHEMA
    for step in pointer.split("/")[1:]:
        node = node.get("properties", {}).get(step, {})
        if "$ref" in node:
            node = _node(node["$ref"].replace("/properties", "").removeprefix("#"))
    return node


def _schema_keys(node: dict[str, Any], at: str = "") -> list[str]:
    found = []
    for name, member in node.get("properties", {}).items():
        if name not in ("$schema", "dsplan"):
            found += [f"{at}/{name}", *_schema_keys(member, f"{at}/{name}")]
    return found


KEYS = _schema_keys(SCHEMA)
"""Every key that the schema knows, as a pointer."""
HOMES = sorted({pointer.rpartition("/")[0] for pointer in KEYS})
NUMBERS = [
    0,
    1,
    2,
    3,
    4,
    7,
    8,
    -1,
    -2,
    100,
    2**31,
    10**12,
    10**20,
    -(10**9),
    0.0,
    0.5,
    1.5,
    2.0,
    -0.5,
    1e-8,
    1e9,
    1e10,
    3e10,
    1e30,
]
TEXTS = [
    "",
    "auto",
    "none",
    "null",
    "true",
    "false",
    "True",
    "yes",
    "off",
    "0",
    "1",
    "2",
    "4",
    "-1",
    "1.0",
    "1.5",
    "1e3",
    "5e8",
    "5_000",
    " 3 ",
    "inf",
]
WORDS = [
    "cpu",
    "CPU",
    "nvme",
    "fp16",
    "FP32",
    "bfloat16",
    "half",
    "sum",
    "Mean",
    "warn",
    "FAIL",
    "adamw",
    "SGD",
    "LION",
    "WarmupLR",
    "step",
    "fast",
    "mock",
    "no_such_word",
]
SHAPES: list[Any] = [
    None,
    True,
    False,
    [],
    {},
    [1],
    ["a"],
    ["auto"],
    [None],
    {"enabled": True},
    {"enabled": False},
    {"device": "cpu"},
    {"a": 1},
    [{}],
]
VALUES = st.sampled_from([*NUMBERS, *TEXTS, *WORDS, *SHAPES])


def _range(node: dict[str, Any]) -> list[Any]:
    """Values about the edges of what the schema allows there."""
    found: list[Any] = []
    for word in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        if word in node:
            edge = node[word]
            found += [edge, edge - 1, edge + 1, edge / 2 + 0.25]
    for word in node.get("enum", []):
        found += [word, word.upper(), word + "s", word.capitalize()] if isinstance(word, str) else [word]
    if "default" in node:
        found.append(node["default"])
    return found or [0, -1, 10**12, 1e30]


@st.composite
def mutants(draw: st.DrawFn) -> Mutant:
    """A valid configuration with one key renamed, moved, retyped, out of range or new; seldom with nothing done to it."""
    parts = [("batch", draw(st.sampled_from(sorted(BATCHES))))]
    parts += [("precision", draw(st.sampled_from(sorted(PRECISIONS)))), ("zero", draw(st.sampled_from(sorted(ZEROS))))]
    blocks = draw(st.lists(st.sampled_from(sorted(BLOCKS)), min_size=0, max_size=3, unique=True))
    parts += [("block", name) for name in blocks]
    base = Mutant(tuple(parts), draw(st.sampled_from(WORLD_SIZES)), "", "", None)
    there = _pointers(base.base)
    kind = draw(st.sampled_from(("renamed", "moved", "retyped", "range", "new", "retyped", "range", "new", "nothing")))
    if kind == "nothing":
        return base
    if kind == "new":
        pointer = draw(st.sampled_from(KEYS))
        value = draw(st.one_of(VALUES, st.sampled_from(_range(_node(pointer)))))
        return Mutant(base.parts, base.world_size, "", pointer, value)
    pointer = draw(st.sampled_from(there))
    home, _, name = pointer.rpartition("/")
    old = _holder(base.base, pointer)[name]
    if kind == "retyped":
        return Mutant(base.parts, base.world_size, "", pointer, draw(VALUES))
    if kind == "range":
        return Mutant(base.parts, base.world_size, "", pointer, draw(st.sampled_from(_range(_node(pointer)))))
    if kind == "moved":
        return Mutant(base.parts, base.world_size, pointer, f"{draw(st.sampled_from(HOMES))}/{name}", old)
    return Mutant(base.parts, base.world_size, pointer, f"{home}/{draw(_misspelt(name))}", old)


def _misspelt(name: str) -> st.SearchStrategy[str]:
    at = st.integers(0, len(name) - 1)
    return st.one_of(
        at.map(lambda i: name[:i] + name[i + 1 :] or "x"),
        at.map(lambda i: name[:i] + name[i : i + 2][::-1] + name[i + 2 :]),
        at.map(lambda i: name[:i] + name[i] + name[i:]),
        st.sampled_from(
            [
                name.upper(),
                name.capitalize(),
                name + "s",
                name + " ",
                "use_" + name,
                name.replace("_", "-"),
                "no_such_key",
            ]
        ),
    )
