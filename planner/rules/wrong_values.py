"""DSP0xx, continued: values of the wrong type, out of range, "auto" where nobody fills it, words without quotes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from dsplan.planner.rules.known_keys import Member, members, title
from dsplan.planner.rules.mechanism import ERROR, INFO, WARNING, Hit, replaced, rule
from dsplan.planner.rules.values import counts_as_number, fault, moment
from dsplan.schemas.json_parser import PYTHON_WORDS
from dsplan.schemas.positions import BOM, Document, shape

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dsplan.schemas.finding import Severity


def _late(member: Member, document: Document) -> Severity:
    """An error where DeepSpeed checks the value, at once or later; else it takes it as it is."""
    return ERROR if member.strict or _checked_later(member, document) else WARNING


def plugin_fills() -> Mapping[str, Any]:
    from dsplan.planner.auditing.filling import PLUGIN_FILLS

    return PLUGIN_FILLS


_OVERWRITTEN = "/steps_per_print"
"""Accelerate, which the Trainer goes through, sets it to infinity. Source: accelerate/utils/dataclasses.py, DeepSpeedPlugin."""


def _checked_later(member: Member, document: Document) -> bool:
    node = member.node or {}
    return "x-late" in node and ("x-when" not in node or bool(document.at(node["x-when"])))


@rule("DSP003", "wrong-type", severity=ERROR, keys=[])
def wrong_type(document: Document, reader: str) -> Iterator[Hit]:
    """A value must have the type that its key asks for.

    Why:    The blocks with a model (zero_optimization, fp16, bf16, ...) refuse it at start-up, though "2" and 5e8 pass for
            whole numbers there. Elsewhere the value is stored as it is and fails later: error; or never: warning.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "steps_per_print": "10"}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "steps_per_print": 10}
    Fix:    none
    Source: deepspeed/runtime/config_utils.py, DeepSpeedConfigModel; deepspeed/runtime/config.py
    """
    for member in members(document):
        found = fault(member, document)
        if found and found.kind == "type" and not counts_as_number(member, document):
            near, more = "", ""
            severity, raises = _late(member, document), moment(member, "type", document)
            if member.pointer == _OVERWRITTEN and (reader != "deepspeed" or raises == "never"):
                severity, raises = WARNING, "never"
                more = "" if reader == "deepspeed" else "; Accelerate overwrites it"
            if isinstance(member.value, float) and "whole number" in found.must and abs(member.value) < 1e15:
                near = f"set {int(member.value)}"
            yield Hit(
                member.pointer,
                f"{title(member.pointer)} is {shape(member.value)}, but must be {found.must}{more}",
                remedy=near,
                severity=severity,
                raises=raises,
            )


_BELOW_0 = {"/gradient_clipping": "nothing is clipped", "/steps_per_print": "every step is reported"}
"""What DeepSpeed makes of numbers that it takes and nobody means. Tried with DeepSpeed 0.19.8."""


@rule("DSP004", "value-not-allowed", severity=ERROR, keys=[])
def value_not_allowed(document: Document, reader: str) -> Iterator[Hit]:
    """A value must be one of those, or in the range, that its key allows.

    Why:    The blocks with a model refuse it at start-up. Elsewhere it fails later: error; or never: warning. A warmup_type
            that is replaced by "log" is an error where DeepSpeed reads the file, and a warning where HF fills the schedule.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 4}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3}}
    Fix:    none
    Source: deepspeed/runtime/zero/config.py; deepspeed/runtime/precision_config.py; deepspeed/runtime/config.py
    """
    for member in members(document):
        found = fault(member, document)
        if found and found.kind == "range":
            severity = _late(member, document)
            more = ""
            raises = moment(member, "range", document)
            if member.pointer in _BELOW_0 and member.value < 0:
                severity, raises, more = WARNING, "never", f"; below 0 {_BELOW_0[member.pointer]}"
            elif member.pointer == _OVERWRITTEN and reader != "deepspeed":
                severity, raises, more = WARNING, "never", "; Accelerate overwrites it"
            elif member.pointer == "/gradient_clipping":
                severity = ERROR
            elif member.name == "legacy_stage1" and not _checked_later(member, document):
                severity, raises, more = WARNING, "never", "; at zero_stage 0 nothing reads it"
            if member.name == "warmup_type":
                # HF fills the schedule in from the training arguments; there the key is a leftover, not a choice
                severity = ERROR if reader == "deepspeed" else WARNING
                more = '; DeepSpeed warns and takes "log"'
            yield Hit(
                member.pointer,
                f"{title(member.pointer)} is {shape(member.value)}, but must be {found.must}{more}",
                severity=severity,
                raises=raises,
            )


@rule("DSP007", "auto-outside-hf", severity=ERROR, keys=[])
def auto_outside_hf(document: Document, reader: str) -> Iterator[Hit]:
    """ "auto" must stand only where the reader fills it.

    Why:    HF Trainer and Accelerate fill "auto" in some 29 keys. DeepSpeed by itself drops it in the blocks with a model, so
            that the default holds (zero_stage 0!), and keeps the text elsewhere, which fails later. Error where it fails or
            decides what is trained; warning where a size stays at its default, and under the Trainer where it leaves the key
            to Accelerate, which takes zero_stage 2 and no offload; info where nothing is lost.
    Bad:    {"train_batch_size": "auto", "gradient_clipping": 1.0}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0}
    Given:  reader deepspeed
    Fix:    none
    Source: deepspeed/runtime/config_utils.py, DeepSpeedConfigModel; transformers/integrations/deepspeed.py, trainer_config_process
    """
    for member in members(document):
        found = fault(member, document)
        node = member.node
        if node is None or found is None or found.kind != "auto":
            continue
        filler = node.get("x-auto")
        if (filler == "trainer" and reader != "deepspeed") or (filler == "accelerate" and reader == "accelerate"):
            continue
        left = plugin_fills() if filler == "accelerate" and reader == "trainer" else {}
        if member.pointer in left:
            name = title(member.pointer)
            fate = json.dumps(left[member.pointer])
            said = f'{name} is "auto", which the Trainer leaves to Accelerate: {fate} unless the launch says otherwise'
            yield Hit(member.pointer, said, remedy="write a value", severity=WARNING, raises="never")
            continue
        if member.pointer == _OVERWRITTEN and reader != "deepspeed":
            said = 'steps_per_print is "auto", which nobody fills; Accelerate overwrites it'
            yield Hit(member.pointer, said, remedy="write a number, or remove it", severity=WARNING, raises="never")
            continue
        who = "nobody fills"
        if filler:
            who = "only Accelerate fills" if filler == "accelerate" else "only HF Trainer and Accelerate fill"
        said = f'{title(member.pointer)} is "auto", which {who}'
        if member.strict and reader == "accelerate":
            yield Hit(member.pointer, f"{said}; Accelerate refuses the file", remedy="write a value", raises="load")
        elif member.strict:
            default = json.dumps(node["default"]) if "default" in node else "its default"
            severity: Severity = ERROR if "x-auto-decides" in node else WARNING if filler else INFO
            fate = f"; DeepSpeed drops it and takes {default}" + _WITHOUT.get(member.pointer, "")
            yield Hit(member.pointer, said + fate, remedy="write a value, or remove it", severity=severity)
        elif filler or _checked_later(member, document):
            yield Hit(
                member.pointer,
                f"{said}; DeepSpeed keeps it as a text and fails on it",
                remedy="write a value",
                raises=moment(member, "auto", document),
            )
        elif node.get("type") == "boolean":
            yield Hit(
                member.pointer,
                f"{said}; DeepSpeed keeps it as a text, which counts as true",
                remedy="write true or false",
            )
        else:
            yield Hit(member.pointer, f"{said}; DeepSpeed keeps it as a text", remedy="write a value", severity=WARNING)


_WITHOUT = {
    "/zero_optimization/stage": ": zero_stage is 0, and ZeRO is off",
    "/fp16/enabled": ": fp16 is off",
    "/bf16/enabled": ": bf16 is off",
    "/zero_optimization/offload_param/device": ": parameters stay on the GPU",
    "/zero_optimization/offload_optimizer/device": ": optimizer state stays on the GPU",
}
"""What the default means that holds in the place of "auto"."""


@rule("DSP008", "block-not-an-object", severity=ERROR, keys=[])
def block_not_an_object(document: Document) -> Iterator[Hit]:
    """A block must be an object; null and true are none.

    Why:    DeepSpeed looks into nearly every block without a check, and raises a TypeError or AttributeError.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "fp16": true}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "fp16": {"enabled": true}}
    Fix:    safe for true and false where the block has a key "enabled".
    Source: deepspeed/runtime/config.py, _initialize_params
    """
    for member in members(document):
        found = fault(member, document)
        if found and found.kind == "flag":
            fix, remedy = None, "remove it" if member.value is None else ""
            if isinstance(member.value, bool) and "enabled" in (member.node or {}).get("properties", {}):
                block = json.dumps({"enabled": member.value})
                remedy = f"write {block}"
                fix = replaced(document.values_at[member.pointer], block)
            yield Hit(
                member.pointer,
                f"{title(member.pointer)} is {shape(member.value)}, but must be {found.must}",
                remedy=remedy,
                fix=fix,
                severity=WARNING if member.pointer == "/dsplan" else None,  # lint's own
                raises="never" if member.pointer == "/dsplan" else moment(member, "flag", document),
            )


@rule("DSP013", "swallowed-line", severity=ERROR, keys=[])
def swallowed_line(document: Document) -> Iterator[Hit]:
    """A word without quotes takes the rest of its line with it, the comma too.

    Why:    hjson reads  False,  as the text "False,". In an untyped key that text counts as true, so the option is on.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0,
             "prescale_gradients": False,
             "dump_state": false}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0,
             "prescale_gradients": false,
             "dump_state": false}
    Fix:    safe
    Source: hjson/decoder.py, scantfnns; deepspeed/runtime/config.py
    """
    for member in members(document):
        found = fault(member, document)
        if not found or found.kind != "swallowed":
            continue
        raw = document.raw(member.pointer)
        word = raw.rstrip(",").strip()
        written = PYTHON_WORDS.get(word) or (word if word in ("true", "false", "null") else json.dumps(word))
        types = (member.node or {}).get("type")
        fate = ""
        if member.strict and types != "string":
            fate = ", which DeepSpeed refuses"
        elif types == "boolean":
            fate = " and counts as true"
        fix = None
        if raw.endswith(",") and "," not in word and "}" not in word and "]" not in word:
            fix = replaced(document.values_at[member.pointer], written + ",")
        yield Hit(
            member.pointer,
            f"{title(member.pointer)} is the text {shape(member.value)}{fate}: a word without quotes takes the rest of its line",
            remedy=f"write {written},",
            fix=fix,
            raises=moment(member, "swallowed", document),
        )


@rule("DSP014", "text-for-boolean", severity=ERROR, keys=[])
def text_for_boolean(document: Document) -> Iterator[Hit]:
    """true and false must stand without quotes where DeepSpeed does not check the type.

    Why:    There any text counts as true, "false" too. Error where the text says no or DeepSpeed fails on it, else warning.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "prescale_gradients": "false"}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "prescale_gradients": false}
    Fix:    safe for "true" and "false".
    Source: deepspeed/runtime/config.py (get_scalar_param)
    """
    for member in members(document):
        found = fault(member, document)
        if not found or found.kind != "text-for-boolean":
            continue
        word = member.value.strip().lower()
        no = word in ("false", "no", "off", "0", "", "none", "null")
        late = _checked_later(member, document)
        fate = "and fails on it" if late else f"and it counts as {'true' if member.value else 'false'}"
        fix = replaced(document.values_at[member.pointer], word) if word in ("true", "false") else None
        yield Hit(
            member.pointer,
            f"{title(member.pointer)} is the text {shape(member.value)}; DeepSpeed keeps it as a text, {fate}",
            remedy=f"write {'false' if no else 'true'} without quotes"
            if no or word == "true"
            else "write true or false",
            fix=fix,
            severity=ERROR if late or (no and member.value) else WARNING,
            raises=moment(member, "text-for-boolean", document),
        )


@rule("DSP016", "stage-as-text", severity=WARNING, keys=["/zero_optimization/stage"])
def stage_as_text(document: Document, reader: str) -> Iterator[Hit]:
    """zero_optimization.stage should be a number, not a text.

    Why:    DeepSpeed reads "3" as 3. HF Trainer and Accelerate compare with the number, and believe that it is not stage 3.
    Given:  reader trainer
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": "2"}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2}}
    Fix:    safe
    Source: transformers/integrations/deepspeed.py, is_zero3
    """
    stage = document.at("/zero_optimization/stage")
    if reader != "deepspeed" and isinstance(stage, str) and stage in ("0", "1", "2", "3"):
        yield Hit(
            "/zero_optimization/stage",
            f'zero_optimization.stage is the text "{stage}": DeepSpeed runs stage {stage}, HF does not see it',
            remedy=f"write {stage}",
            fix=replaced(document.values_at["/zero_optimization/stage"], stage),
        )


@rule("DSP017", "no-zero-for-accelerate", severity=ERROR, keys=["/zero_optimization"])
def no_zero_for_accelerate(document: Document, reader: str) -> Iterator[Hit]:
    """Accelerate needs a zero_optimization block.

    Why:    It raises a ValueError while it reads the file. DeepSpeed by itself takes zero_stage 0.
    Given:  reader accelerate
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 0}}
    Fix:    none
    Source: accelerate/utils/dataclasses.py, DeepSpeedPlugin.__post_init__
    """
    marked = document.text.startswith(BOM)  # Accelerate stops there already, and another rule says so
    if reader != "accelerate" or marked or not isinstance(document.value, dict):
        return
    if "zero_optimization" not in document.value:
        yield Hit(
            "", "there is no zero_optimization block, and Accelerate needs one", remedy='add {"stage": 0} or more'
        )


@rule("DSP018", "key-without-effect", severity=WARNING, keys=[])
def key_without_effect(document: Document) -> Iterator[Hit]:
    """A key that DeepSpeed stores and nothing reads.

    Why:    It looks as if it did something. Said only where the value differs from the default.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "pipeline": {"seed_layers": true}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "pipeline": {"activation_checkpoint_interval": 1}}
    Fix:    none
    Source: deepspeed/runtime/config.py; deepspeed/runtime/zero/config.py
    """
    for member in members(document):
        dead = (member.node or {}).get("x-dead")
        if not dead or member.value == (member.node or {}).get("default") or member.value == "auto":
            continue
        reason = (member.node or {})["description"].removeprefix("Has no effect").lstrip(": .").rstrip(".")
        yield Hit(
            member.pointer,
            f"{title(member.pointer)} has no effect" + (f": {reason[:1].lower()}{reason[1:]}" if reason else ""),
            on_key=True,
            severity=INFO if dead == "info" else WARNING,
        )


@rule("DSP019", "checkpointing-not-configured", severity=INFO, keys=["/activation_checkpointing"])
def checkpointing_not_configured(document: Document) -> Iterator[Hit]:
    """activation_checkpointing acts only through deepspeed.checkpointing.configure().

    Why:    deepspeed.initialize does not apply the block. The script must call configure and use DeepSpeed's checkpoint().
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "activation_checkpointing": {"cpu_checkpointing": true}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0}
    Fix:    none
    Source: deepspeed/runtime/activation_checkpointing/checkpointing.py, configure
    """
    block = document.at("/activation_checkpointing")
    if isinstance(block, dict) and any(value not in (False, None) for value in block.values()):
        yield Hit(
            "/activation_checkpointing",
            "activation_checkpointing acts only where the script calls deepspeed.checkpointing.configure()",
            on_key=True,
        )
