"""DSP04x: values that DeepSpeed takes for something else than what is written, and a block that switches nothing on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsplan.planner.rules.known_keys import Member, members, title
from dsplan.planner.rules.mechanism import ERROR, INFO, WARNING, Hit, replaced, rule
from dsplan.planner.rules.values import counts_as_number, fault, held_value
from dsplan.schemas.positions import Document, number, shape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dsplan.schemas.finding import Severity

_STAGE = "/zero_optimization/stage"


def _types(member: Member) -> list[str]:
    types = (member.node or {}).get("type", [])
    return [types] if isinstance(types, str) else list(types)


def _taken_numbers(document: Document) -> Iterator[tuple[Member, int | float]]:
    """Members that a strict block takes for a number, and that number."""
    for member in members(document):
        types = _types(member)
        if counts_as_number(member, document):
            yield member, int(member.value)
            continue
        numeric = member.strict and "boolean" not in types and ("integer" in types or "number" in types)
        other = isinstance(member.value, (bool, str)) and member.value != "auto"
        if numeric and other and fault(member, document) is None:
            held = held_value(member.value, member.node or {}, member.name)
            if isinstance(held, (int, float)):
                yield member, held


@rule("DSP040", "true-for-a-number", severity=WARNING, keys=[])
def true_for_a_number(document: Document) -> Iterator[Hit]:
    """true and false count as 1 and 0 where a number is meant.

    Why:    The blocks with a model (zero_optimization, fp16, ...) do not refuse it: a bucket of true holds one element.
            Nor does the top level, for batch keys, gradient_clipping and steps_per_print.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": true}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 1}}
    Fix:    none
    Source: deepspeed/runtime/config_utils.py, DeepSpeedConfigModel (pydantic's lax mode)
    """
    for member, held in _taken_numbers(document):
        if isinstance(member.value, bool):
            yield Hit(
                member.pointer,
                f"{title(member.pointer)} is {shape(member.value)}, which DeepSpeed takes as {int(held)}",
                remedy="write the number that is meant",
            )


@rule("DSP041", "number-as-text", severity=INFO, keys=["/zero_optimization"])
def number_as_text(document: Document, reader: str) -> Iterator[Hit]:
    """A number should stand without quotes.

    Why:    The blocks with a model read "500000000" as a number. Other readers of the file (HF, scripts) see a text.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2, "reduce_bucket_size": "500_000_000"}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2, "reduce_bucket_size": 500000000}}
    Fix:    safe
    Source: deepspeed/runtime/config_utils.py, DeepSpeedConfigModel (pydantic's lax mode)
    """
    for member, held in _taken_numbers(document):
        if isinstance(member.value, str) and not (member.pointer == _STAGE and reader != "deepspeed"):
            yield Hit(
                member.pointer,
                f"{title(member.pointer)} is the text {shape(member.value)}, which DeepSpeed takes as {number(held)}",
                remedy=f"write {number(held)}",
                fix=replaced(document.values_at[member.pointer], number(held)),
            )


@rule("DSP042", "word-for-a-switch", severity=INFO, keys=["/fp16/enabled", "/bf16/enabled"])
def word_for_a_switch(document: Document, reader: str) -> Iterator[Hit]:
    """A switch should be true or false, not a word or a number for it.

    Why:    The blocks with a model take "on", "yes", "true", 1 and the like. HF Trainer compares fp16.enabled and
            bf16.enabled with its own true or false, and raises on a text: there it is an error.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "bf16": {"enabled": "on"}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "bf16": {"enabled": true}}
    Fix:    safe
    Source: deepspeed/runtime/config_utils.py, DeepSpeedConfigModel (pydantic's lax mode); transformers/integrations/deepspeed.py, fill_match
    """
    for member in members(document):
        value = member.value
        if not member.strict or "boolean" not in _types(member) or isinstance(value, bool) or value is None:
            continue
        if value == "auto" or fault(member, document) is not None:
            continue
        held = held_value(value, member.node or {}, member.name)
        if not isinstance(held, bool):
            continue
        compared = reader == "trainer" and isinstance(value, str) and (member.node or {}).get("x-auto") == "trainer"
        severity: Severity = ERROR if compared else INFO
        word = "true" if held else "false"
        more = "; HF Trainer compares it with its own argument and raises" if compared else ""
        yield Hit(
            member.pointer,
            f"{title(member.pointer)} is {shape(value)}, which DeepSpeed takes as {word}{more}",
            remedy=f"write {word}",
            fix=replaced(document.values_at[member.pointer], word),
            severity=severity,
            raises="load" if compared else "never",
        )


@rule("DSP043", "zero-without-stage", severity=WARNING, keys=[_STAGE])
def zero_without_stage(document: Document) -> Iterator[Hit]:
    """A zero_optimization block without a stage is zero_stage 0: no ZeRO.

    Why:    The stage is 0 where it is not there, and most other keys of the block then do nothing.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"overlap_comm": true}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2, "overlap_comm": true}}
    Fix:    none
    Source: deepspeed/runtime/zero/config.py, DeepSpeedZeroConfig
    """
    block = document.at("/zero_optimization")
    if isinstance(block, dict) and block and "stage" not in block:
        yield Hit(
            "/zero_optimization",
            "zero_optimization has no stage, so zero_stage is 0 and ZeRO is off",
            remedy='add "stage"',
            on_key=True,
        )
