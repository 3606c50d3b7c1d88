"""Diff: two configurations by what their reader holds, and whether they train the same model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsplan.planner.auditing.argument_defaults import IMPLEMENTATION, argument_defaults
from dsplan.planner.auditing.holding import no_effect
from dsplan.schemas.known_keys import lookup
from dsplan.schemas.positions import shape, steps
from dsplan.schemas.resolved import Comparison, Difference, Held, Resolved

Table = Mapping[str, Held]
BATCH, MICRO, STEPS = "/train_batch_size", "/train_micro_batch_size_per_gpu", "/gradient_accumulation_steps"
SEQUENCE, TENSOR = "/sequence_parallel_size", "/tensor_parallel/autotp_size"
_DECIDE = (
    "/fp16",
    "/bf16",
    "/torch_autocast",
    "/data_types",
    "/communication_data_type",
    "/seq_parallel_communication_data_type",
    "/gradient_clipping",
    "/gradient_allreduce_op",
    "/optimizer",
    "/scheduler",
    "/data_efficiency",
    "/weight_quantization",
    "/expert_parallel",
    "/zero_optimization/zenflow",
    "/zero_optimization/zero_quantized_weights",
    "/zero_optimization/zero_quantized_nontrainable_weights",
    "/zero_optimization/zero_quantized_gradients",
)
"""Keys and blocks that change what is trained. All others change where it lives, how it travels, and what is printed."""


def compare(a: Resolved, b: Resolved) -> Comparison:
    """Every key whose effective value differs, and the verdict. Both must hold everything (resolve with everything=True)."""
    left, right = a.by_pointer(), b.by_pointer()
    stages = _stage(left), _stage(right)
    differences = []
    for pointer in [*left, *(pointer for pointer in right if pointer not in left)]:
        one, other = _at_work(left, pointer), _at_work(right, pointer)
        if _same(pointer, one, other) or all(no_effect(pointer, stage) for stage in stages):
            continue
        if pointer in (MICRO, STEPS):
            decides = False
        elif pointer == BATCH:
            decides = not _same_batch(left, right)
        else:
            decides = _decides(pointer, left, right)
        differences.append(Difference(pointer=pointer, a=one, b=other, decides=decides))
    reasons = list(_batch_reason(left, right)) + [
        _reason(one) for one in differences if one.decides and _told(one, left, right)
    ]
    return Comparison(
        a=a,
        b=b,
        differences=tuple(differences),
        same_model=not reasons,
        because=tuple(reasons) or (_why_same(left, right, bool(differences)),),
    )


def _told(difference: Difference, left: Table, right: Table) -> bool:
    """Not the batch, which has a reason of its own, and not what stands in a block that one side lacks."""
    block = difference.pointer.split("/")[1]
    kind = f"/{block}/type"
    lacking = block in ("optimizer", "scheduler") and (_at(left, kind) is None) != (_at(right, kind) is None)
    return difference.pointer != BATCH and (not lacking or difference.pointer == kind)


def _at_work(table: Table, pointer: str) -> Held | None:
    """What counts at a key: the value, or what the optimizer or schedule takes by default."""
    held = _effective(table.get(pointer))
    block, _, name = pointer[1:].partition("/params/")
    if held is None and name and "/" not in name:
        lr = _at_work(table, "/optimizer/params/lr") if name == "warmup_max_lr" else None
        defaults = argument_defaults(block, _at(table, f"/{block}/type"), lr.value if lr else None)
        if name in defaults:
            return Held(pointer=pointer, value=defaults[name], origin="default")
    return held


def _effective(held: Held | None) -> Held | None:
    """None for what nothing reads. A key that another stage reads is held all the same."""
    return None if held is None or (held.origin == "ignored" and not held.note.startswith("no effect at")) else held


def _same(pointer: str, a: Held | None, b: Held | None) -> bool:
    if a is None or b is None:
        return (a is None and b is None) or _value(pointer, a) == _value(pointer, b)
    return bool(_value(pointer, a) == _value(pointer, b))


def _value(pointer: str, held: Held | None) -> Any:
    """The value by which two sides are compared: names in lower case, what an optimizer is not told as its default."""
    if held is None:
        return None
    if pointer == "/optimizer/type" and isinstance(held.value, str):
        lowered = held.value.lower()
        return "adamw" if lowered == "adam" else lowered
    if isinstance(held.value, str) and (lookup(pointer) or {}).get("x-any-case"):
        return held.value.lower()
    return held.value


def _decides(pointer: str, left: Table, right: Table) -> bool:
    """The key changes what is trained, on at least one of the two sides."""
    if not any(pointer == start or pointer.startswith(f"{start}/") for start in _DECIDE):
        return False
    if pointer == "/fp16/auto_cast":
        return True
    if pointer.startswith("/optimizer/params/") and _no_mathematics(pointer, left, right):
        return False
    blocks = pointer.split("/")[1:-1]
    for depth in range(1, len(blocks) + 1):
        switch = f"/{'/'.join(blocks[:depth])}/enabled"
        known = any(switch in table for table in (left, right))
        if known and pointer != switch and not any(_is_on(table, switch) for table in (left, right)):
            return False
    return True


def _no_mathematics(pointer: str, left: Table, right: Table) -> bool:
    """The parameter chooses an implementation, or the type overrules it (AdamW is AdamW whatever adam_w_mode says)."""
    name = steps(pointer)[-1]
    kinds = [_at(table, "/optimizer/type") for table in (left, right)]
    adamw = all(isinstance(kind, str) and kind.lower() == "adamw" for kind in kinds)
    return name in IMPLEMENTATION or (name == "adam_w_mode" and adamw)


def _is_on(table: Table, pointer: str) -> bool:
    held = table.get(pointer)
    return held is not None and held.value not in (False, None, "auto")


def _stage(table: Table) -> int:
    held = table.get("/zero_optimization/stage")
    return held.value if held is not None and isinstance(held.value, int) else 0


def _at(table: Table, pointer: str) -> Any:
    return table[pointer].value if pointer in table else None


def _degree(table: Table, pointer: str) -> int:
    """How many GPUs see the same samples by that key."""
    value = _at(table, pointer)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 1 else 1


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _same_product(left: Table, right: Table) -> bool | None:
    """micro_batch x accumulation is the same; None where that is not known. An unfilled "auto" is equal to another."""
    shares = [_degree(side, SEQUENCE) * _degree(side, TENSOR) for side in (left, right)]
    micros, accumulations = [_at(side, MICRO) for side in (left, right)], [_at(side, STEPS) for side in (left, right)]
    if all(map(_number, micros + accumulations)):
        return bool(micros[0] * accumulations[0] * shares[1] == micros[1] * accumulations[1] * shares[0])
    if shares[0] != shares[1]:
        return False if micros[0] == micros[1] and accumulations[0] == accumulations[1] else None
    for same, other in ((micros, accumulations), (accumulations, micros)):
        if same[0] == same[1]:
            return bool(other[0] == other[1]) if other[0] == other[1] or all(map(_number, other)) else None
    return None


def _same_batch(left: Table, right: Table) -> bool | None:
    """The global batch is the same; None where that is not known."""
    totals = [_at(side, BATCH) for side in (left, right)]
    if all(map(_number, totals)):
        return bool(totals[0] * _degree(right, TENSOR) == totals[1] * _degree(left, TENSOR))
    return _same_product(left, right) if totals[0] == totals[1] else None


def _batch_reason(left: Table, right: Table) -> list[str]:
    same = _same_batch(left, right)
    if same:
        return []
    if same is None:
        autos = any(_at(side, key) == "auto" for side in (left, right) for key in (BATCH, MICRO, STEPS))
        return [
            f"the global batch is not known on both sides (give --cluster{', and --args for auto' if autos else ''})"
        ]
    parts = [(name, _at(left, pointer), _at(right, pointer)) for name, pointer in _BATCH_NAMES]
    total, micro, accumulation = parts
    tensor, sequence = [[_degree(side, key) for side in (left, right)] for key in (TENSOR, SEQUENCE)]
    if tensor[0] != tensor[1]:
        return [f"a step holds other samples: tensor_parallel.autotp_size is {tensor[0]} in A and {tensor[1]} in B"]
    if _number(total[1]):
        return [f"the global batch is {total[1]} in A and {total[2]} in B"]
    if sequence[0] != sequence[1]:
        return [f"the global batch differs: sequence_parallel_size is {sequence[0]} in A and {sequence[1]} in B"]
    if all(_number(value) for part in (micro, accumulation) for value in part[1:]):
        return [
            f"micro_batch x accumulation is {micro[1] * accumulation[1]} in A and {micro[2] * accumulation[2]} in B"
        ]
    name, one, other = micro if micro[1] != micro[2] else accumulation
    return [f"{name} is {one} in A and {other} in B, and so the global batch differs"]


_BATCH_NAMES = (("the global batch", BATCH), ("micro_batch", MICRO), ("accumulation", STEPS))


def _reason(difference: Difference) -> str:
    name = ".".join(steps(difference.pointer))
    if difference.a is None or difference.b is None:
        held, side = (difference.b, "B") if difference.a is None else (difference.a, "A")
        assert held is not None
        return f"{name} is {_word(held)} in {side} only"
    return f"{name} is {_word(difference.a)} in A and {_word(difference.b)} in B"


def _word(held: Held) -> str:
    if isinstance(held.value, list) and all(isinstance(entry, (int, float)) for entry in held.value):
        return f"[{', '.join(str(entry) for entry in held.value)}]"
    return shape(held.value) + (" (unfilled)" if held.origin == "auto" and held.value == "auto" else "")


def _why_same(left: Table, right: Table, differs: bool) -> str:
    if "/optimizer/type" in left or "/optimizer/type" in right:
        text = "global batch, precision, clipping, optimizer and schedule are equal"
    else:
        text = "global batch, precision and clipping are equal, and neither names an optimizer (the script's is not compared)"
    return text + ("; what differs is where things live and how they travel" if differs else "")
