"""What DeepSpeed makes of the object that it is given: defaults, coercions, old keys, what it ignores, batch sizes."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dsplan.planner.rules.values import AUTO, held_value
from dsplan.schemas.config import BATCH_KEYS
from dsplan.schemas.known_keys import Node, child, lookup, schema
from dsplan.schemas.positions import Document, escape, shape, steps
from dsplan.schemas.resolved import Held, Origin

if TYPE_CHECKING:
    from dsplan.schemas.cluster import Cluster

ZERO = "/zero_optimization"
Told = Mapping[str, tuple[Origin, str]]
"""Pointers that the HF Trainer or Accelerate decided, with origin and note."""
_OWN = ("$schema", "dsplan")
_ARGUMENTS = ("/optimizer/params", "/scheduler/params")
_SCRIPT_GIVES_IT = "DSP101"
"""A file without any batch size: DeepSpeed refuses it, but scripts lay one over it."""
_STAGES = {f"{ZERO}/offload_param": (3,), f"{ZERO}/offload_optimizer": (1, 2, 3)}
"""Beside what the schema says of keys: stages that read a block. Source: deepspeed/runtime/engine.py."""
_REPLACED = {
    f"{ZERO}/cpu_offload": "offload_optimizer",
    f"{ZERO}/cpu_offload_param": "offload_param",
    f"{ZERO}/stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
}
"""Old keys to what they set. Source: deepspeed/runtime/zero/config.py, new_param_fn."""


def held_by_deepspeed(
    document: Document, value: Mapping[str, Any], told: Told, cluster: Cluster | None, *, everything: bool
) -> tuple[list[Held], int | None]:
    """The values, and the GPUs that share the batch. value: the document's object, with what a reader filled in."""
    ranks = _sharing(document, cluster)
    walk = _Walk(document=document, told=told, stage=_stage(document, value), everything=everything)
    return _with_derived(list(_block(walk, "", value, schema(), "")), walk, ranks), ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class _Walk:
    """What every step of the walk needs."""

    document: Document
    told: Told
    stage: int | None
    """None: a template leaves it open."""
    everything: bool


def _block(walk: _Walk, pointer: str, value: Mapping[str, Any], node: Node, dead: str) -> Iterator[Held]:
    """The members of a block: those that are there, then the defaults of the others. dead: why nothing reads the block."""
    strict = node.get("x-unknown") == "refused"
    there: set[str] = set()
    for name, entry in value.items():
        inner, known = f"{pointer}/{escape(name)}", child(node, name)
        if pointer == "" and name in _OWN:
            continue
        if known is None or {"x-unread", "x-removed"} & known.keys():
            yield from _unknown(inner, entry, known, node, dead)
            continue
        if inner in _REPLACED:
            yield from _replaced(walk, inner, entry, there)
            continue
        if pointer == "" and name == "bfloat16":
            if value.get("bf16") is None and isinstance(entry, dict):
                yield from _renamed(_block(walk, "/bf16", entry, known, dead), 'written as "bfloat16"')
                there.add("bf16")
            else:
                yield Held(pointer=inner, value=entry, origin="ignored", note="bf16 is there")
            continue
        if name == "bf16" and pointer == "" and entry is None:
            continue
        there.add(str(known.get("x-alias-of", name)))
        held = list(_member(walk, inner, entry, known, strict, dead))
        if "x-alias-of" in known:
            right = f"{pointer}/{known['x-alias-of']}"
            held = [replace(one, pointer=right + one.pointer[len(inner) :]) for one in held]
            held = list(_renamed(held, f'written as "{name}"'))
        yield from held
    if dead and not walk.everything:
        return
    if pointer in _ARGUMENTS:
        yield from _argument_defaults(walk, pointer, node, there)
        return
    for name, known in node.get("properties", {}).items():
        if name not in there and name not in _OWN:
            yield from _absent(walk, f"{pointer}/{escape(name)}", child(node, name) or known, strict)


def _argument_defaults(walk: _Walk, pointer: str, node: Node, there: set[str]) -> Iterator[Held]:
    """Of Adam and AdamW alone: each optimizer and schedule has defaults of its own, and the schema holds these two's."""
    kind = walk.document.at("/optimizer/type")
    if pointer == "/optimizer/params" and isinstance(kind, str) and kind.lower() in ("adam", "adamw"):
        for name in ("lr", "betas", "eps", "weight_decay"):
            if name not in there:
                yield from _absent(walk, f"{pointer}/{name}", child(node, name) or {}, False)


def _renamed(values: Any, note: str) -> Iterator[Held]:
    for held in values:
        yield replace(held, note=note) if held.origin == "file" else held


def _unknown(pointer: str, value: Any, known: Node | None, block: Node, dead: str) -> Iterator[Held]:
    if known is None and block.get("x-unknown") == "passed":
        yield Held(pointer=pointer, value=value, origin="ignored" if dead else "file", note=dead)
        return
    use = f"; write {'.'.join(steps(known['x-use']))}" if known and "x-use" in known else ""
    yield Held(pointer=pointer, value=value, origin="ignored", note=f"not a key that DeepSpeed reads{use}")


def _replaced(walk: _Walk, pointer: str, value: Any, there: set[str]) -> Iterator[Held]:
    """What an old key sets: a flag, or a block with device cpu (null where it is false)."""
    if value in (None, AUTO):
        return
    name, new = steps(pointer)[-1], _REPLACED[pointer]
    is_on = str(value).lower() in ("true", "1", "1.0", "yes", "on", "t", "y")
    right, note = f"{ZERO}/{new}", f"from {name}"
    there.add(new)
    if not new.startswith("offload_"):
        yield Held(pointer=right, value=is_on, origin="derived", note=note)
    elif is_on:
        yield Held(pointer=f"{right}/device", value="cpu", origin="derived", note=note)
        yield from _absent_members(walk, right, lookup(right) or {}, {"device"})
    else:
        yield Held(pointer=right, value=None, origin="derived", note=note)


def _member(walk: _Walk, pointer: str, value: Any, node: Node, strict: bool, dead: str) -> Iterator[Held]:
    dead = dead or _dead(pointer, node, walk.stage)
    if pointer in walk.document.open:
        text = walk.document.open[pointer]
        yield Held(pointer=pointer, value=text, origin="file", note="a placeholder, of which nothing is known")
    elif pointer == ZERO and isinstance(value, bool):
        yield Held(pointer=f"{ZERO}/stage", value=int(value), origin="coerced", note=f"written as {shape(value)}")
        yield from _absent_members(walk, pointer, node, {"stage"})
    elif "x-unknown" in node and isinstance(value, dict):
        yield from _block(walk, pointer, value, node, dead)
    elif pointer in walk.told:
        origin, note = walk.told[pointer]
        yield Held(pointer=pointer, value=value, origin="ignored" if dead else origin, note=dead or note)
    elif isinstance(value, str) and value == AUTO and strict:
        for held in _absent(walk, pointer, node, strict):
            yield replace(held, note='"auto" is dropped')
    else:
        yield _leaf(walk, pointer, value, node, strict, dead)


def _leaf(walk: _Walk, pointer: str, value: Any, node: Node, strict: bool, dead: str) -> Held:
    held = held_value(value, node, steps(pointer)[-1]) if strict else value
    written = walk.document.raw(pointer) if pointer in walk.document.values_at else shape(value)
    other = type(held) is not type(value) and not (isinstance(held, float) and held == value)
    spelt = isinstance(held, int) and not isinstance(held, bool) and not written.strip("-").isdigit()
    if dead:
        return Held(pointer=pointer, value=held, origin="ignored", note=dead)
    if strict and (other or spelt):
        return Held(pointer=pointer, value=held, origin="coerced", note=f"written as {written}")
    note = ""
    if not strict and isinstance(value, str):
        if value == AUTO and node.get("default") != AUTO:
            note = "kept as a text: nobody fills it"
        elif node.get("type") == "boolean":
            note = "a text, which counts as true"
    return Held(pointer=pointer, value=held, origin="file", note=note)


def _dead(pointer: str, node: Node, stage: int | None) -> str:
    if node.get("x-dead"):
        return "nothing reads it"
    stages = node.get("x-stages") or _STAGES.get(pointer)
    return f"no effect at ZeRO stage {stage}" if stages and stage not in stages and stage is not None else ""


def no_effect(pointer: str, stage: int) -> bool:
    """No ZeRO code of that stage reads the key."""
    block = next((name for name in _STAGES if pointer == name or pointer.startswith(f"{name}/")), None)
    stages: Sequence[int] = _STAGES[block] if block else (lookup(pointer) or {}).get("x-stages", ())
    return bool(stages) and stage not in stages


def _absent(walk: _Walk, pointer: str, node: Node, strict: bool) -> Iterator[Held]:
    """What holds where the key is not there."""
    if {"x-unread", "x-removed", "x-alias-of", "deprecated"} & node.keys() or "x-dead" in node:
        return
    types = node.get("type", [])
    if "x-unknown" in node and "default" not in node:
        nullable = strict and "null" in types
        if nullable:
            yield Held(pointer=pointer, value=None, origin="default")
        elif walk.everything or pointer.count("/") > 1:
            yield from _absent_members(walk, pointer, node, set())
    elif "default" in node:
        yield Held(pointer=pointer, value=copy.deepcopy(node["default"]), origin="default")
    elif "null" in types and steps(pointer)[-1] not in BATCH_KEYS:
        yield Held(pointer=pointer, value=None, origin="default")


def _absent_members(walk: _Walk, pointer: str, node: Node, there: set[str]) -> Iterator[Held]:
    if node.get("x-unknown") == "passed" or pointer in ("/optimizer", "/scheduler"):
        return
    strict = node.get("x-unknown") == "refused"
    for name, known in node.get("properties", {}).items():
        if name not in there:
            yield from _absent(walk, f"{pointer}/{escape(name)}", child(node, name) or known, strict)


def _with_derived(values: list[Held], walk: _Walk, ranks: int | None) -> list[Held]:
    """The batch sizes solved, and what DeepSpeed makes of one key by another."""
    table = {held.pointer: held for held in values}
    batch = list(_batch(table, ranks))
    overlap = f"{ZERO}/overlap_comm"
    if overlap in table and table[overlap].value is None and walk.stage is not None:
        table[overlap] = Held(
            pointer=overlap, value=walk.stage == 3, origin="derived", note=f"from ZeRO stage {walk.stage}"
        )
    clock, profiler = "/wall_clock_breakdown", table.get("/flops_profiler/enabled")
    if profiler and profiler.value is True and clock in table and table[clock].value is False:
        table[clock] = Held(pointer=clock, value=True, origin="derived", note="from flops_profiler.enabled")
    for held in batch:
        table.pop(held.pointer, None)
    return [*batch, *table.values()]


def _batch(table: Mapping[str, Held], ranks: int | None) -> Iterator[Held]:
    """Source: deepspeed/runtime/config.py, _set_batch_related_parameters; all divisions round down."""
    pointers = [f"/{key}" for key in BATCH_KEYS]
    given = [table.get(pointer) for pointer in pointers]
    numbers = [None if held is None or held.value is None else held.value for held in given]
    total, micro, accumulation = numbers
    if any(isinstance(number, str) for number in numbers):
        yield from (held for held in given if held is not None)
        return
    if accumulation is None and (total is None or micro is None):
        accumulation = 1
    if ranks is not None:
        if total is not None and micro is not None and accumulation is None:
            accumulation = total // micro // ranks
        elif total is not None and micro is None:
            micro = total // ranks // accumulation
        elif micro is not None and total is None:
            total = micro * accumulation * ranks
    solved = (total, micro, accumulation)
    for pointer, held, value in zip(pointers, given, solved, strict=True):
        if held is not None and held.value is not None:
            yield held
        else:
            yield Held(pointer=pointer, value=value, origin="derived", note=_from(pointer, value, numbers))


def _from(pointer: str, value: Any, numbers: list[Any]) -> str:
    if numbers[0] is None and numbers[1] is None:
        return "the script must give a batch size" if value is None else "from nothing"
    if value is None:
        return "needs the number of GPUs: give --cluster"
    return "the others name one batch size" if value == 1 and numbers[0] is None else "from the other batch keys"


def _sharing(document: Document, cluster: Cluster | None) -> int | None:
    """GPUs that share the batch: all / sequence_parallel_size. None where that is not whole."""
    if cluster is None:
        return None
    share = document.at("/sequence_parallel_size", 1)
    if isinstance(share, bool) or not isinstance(share, int) or share < 1:
        return cluster.ranks
    return cluster.ranks // share if cluster.ranks % share == 0 else None


def _stage(document: Document, value: Mapping[str, Any]) -> int | None:
    zero = value.get("zero_optimization")
    if {ZERO, f"{ZERO}/stage"} & document.open.keys():
        return None
    stage = zero.get("stage", 0) if isinstance(zero, dict) else zero or 0
    try:
        return int(float(stage))
    except (TypeError, ValueError):
        return 0
