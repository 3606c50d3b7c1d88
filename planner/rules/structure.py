"""DSP0xx: the text, the keys, and the value of each key by itself."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from dsplan.planner.rules.known_keys import CLOSED, Member, absent, blocks_of, members, title
from dsplan.planner.rules.mechanism import ERROR, WARNING, Hit, replaced, rule
from dsplan.planner.rules.near_names import nearest
from dsplan.schemas.finding import Fix
from dsplan.schemas.positions import BOM, Document, SyntaxProblem, escape, shape, steps

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dsplan.schemas.known_keys import Node


@rule("DSP000", "bad-syntax", severity=ERROR, keys=[], raises="load")
def bad_syntax(syntax: SyntaxProblem, reader: str) -> Iterator[Hit]:
    """The text must be hjson for DeepSpeed, and strict JSON for HF Trainer and Accelerate.

    Why:    The reader raises while it loads the file, often with a position far from the cause.
    Bad:    {"train_batch_size": 8, "bf16": {"enabled": True}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "bf16": {"enabled": true}}
    Fix:    none
    Source: deepspeed/runtime/config.py, DeepSpeedConfig (hjson.load); transformers/integrations/deepspeed.py, HfDeepSpeedConfig (json.load)
    """
    yield Hit("", syntax.message, span=syntax.span)


MOST_UNKNOWN = 1_000
"""Unknown keys of a file that are told one by one. Nobody reads more, and a text of 10 MB can hold 400,000."""


@rule("DSP001", "unknown-key", severity=ERROR, keys=[])
def unknown_key(document: Document, reader: str) -> Iterator[Hit]:
    """Every key must be one that DeepSpeed reads.

    Why:    Most blocks ignore an unknown key without a word, and training goes on without what was meant. Others refuse it
            at start-up. Error where the block refuses it or the meant key is near; else warning. A near key of
            autotuning.arg_mappings is a warning under HF, whose examples write it with a space that the tuner strips.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimisation": {"stage": 2}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2}}
    Fix:    safe where a near key is meant that is not there yet.
    Source: deepspeed/runtime/config.py, _initialize_params (get without a check); deepspeed/runtime/config_utils.py, extra="forbid"
    """
    unknown = [member for member in members(document) if member.node is None and not passed_on(member)]
    for member in unknown[MOST_UNKNOWN:][:1]:
        rest = len(unknown) - MOST_UNKNOWN
        yield Hit(
            member.pointer,
            f"{rest} more unknown key{'s' if rest > 1 else ''} from here on",
            severity=WARNING,
            on_key=True,
        )
    for member in unknown[:MOST_UNKNOWN]:
        if misplaced(member):
            continue
        block = title(member.block_pointer)
        inside = f" in {block}" if block else ""
        said = f"unknown key {shape(member.name)}{inside}"
        meant = near(member)
        if meant:
            known = f"{member.block_pointer}/{escape(meant)}"
            if refused(member):
                effect = "; DeepSpeed refuses it"
            elif document.has(known):
                effect = f"; DeepSpeed ignores it (the {meant} beside it counts)"
            else:
                effect = f"; DeepSpeed ignores it, so {absent(known)}"
            fix = None if document.has(known) else renamed(document, member, meant)
            yield Hit(
                member.pointer,
                f'{said}; did you mean "{meant}"?{effect.replace("; ", " ", 1)}',
                remedy=f'write "{meant}"',
                on_key=True,
                fix=fix,
                severity=WARNING if member.block.get("x-near") == "warning" and reader != "deepspeed" else None,
                raises="parse" if refused(member) else None,
            )
        elif refused(member):
            said += ", which DeepSpeed refuses"
            yield Hit(member.pointer, said, remedy="remove it", on_key=True, raises="parse")
        else:
            yield Hit(member.pointer, f"{said}; DeepSpeed ignores it", on_key=True, severity=WARNING)


def refused(member: Member) -> bool:
    """DeepSpeed raises on a key that this block does not know; one that is "auto" it drops."""
    return member.strict and member.value != "auto"


def near(member: Member) -> str | None:
    """The key of the same block that is meant."""
    properties = member.block.get("properties", {})
    if id(properties) not in _SPELLINGS:
        known = {str(name): node for name, node in properties.items() if "x-removed" not in node}
        aliases = {alias: name for name, node in known.items() for alias in node.get("x-known-as", ())}
        read = tuple(name for name, node in known.items() if not CLOSED & node.keys())
        _SPELLINGS[id(properties)] = (properties, aliases, read)
    _, aliases, read = _SPELLINGS[id(properties)]
    return aliases.get(member.name) or nearest(member.name, read)


_SPELLINGS: dict[int, tuple[Node, dict[str, str], tuple[str, ...]]] = {}
"""Other names and names of each block of the schema, by the id of its properties (kept, so that no other has that id)."""


def passed_on(member: Member) -> bool:
    """An argument of an optimizer or a schedule: judged by its type, in the rules of those."""
    return member.block.get("x-unknown") == "passed"


def misplaced(member: Member) -> tuple[str, ...]:
    """The blocks that know the key, where this one does not and no key of this one is near."""
    homes = tuple(home for home in blocks_of().get(member.name, ()) if home != member.block_pointer)
    return homes if 0 < len(homes) <= 3 and member.name not in COMMON_WORDS and near(member) is None else ()


COMMON_WORDS = frozenset(("group", "mode", "project", "seed", "team", "workspace"))
"""Keys of one block each that mean something else in the files of many programs: elsewhere they are unknown, not misplaced."""


def renamed(document: Document, member: Member, name: str) -> Fix:
    """The key written anew, in the quotes that it had."""
    start, end = document.keys_at[member.pointer]
    quote = document.text[start] if document.text[start] in "\"'" else ""
    return replaced((start, end), f"{quote}{name}{quote}")


@rule("DSP002", "misplaced-key", severity=ERROR, keys=[])
def misplaced_key(document: Document) -> Iterator[Hit]:
    """A key must stand in the block that reads it.

    Why:    Beside it, the key is ignored (or refused), and its default holds.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "overlap_comm": true, "zero_optimization": {"stage": 2}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2, "overlap_comm": true}}
    Fix:    none
    Source: deepspeed/runtime/config.py, _initialize_params; deepspeed/runtime/config_utils.py, extra="forbid"
    """
    unknown = [member for member in members(document) if member.node is None and not passed_on(member)]
    for member in unknown[:MOST_UNKNOWN]:
        homes = misplaced(member)
        if not homes:
            continue
        where = " or ".join(title(home) or "the top level" for home in homes)
        here = title(member.block_pointer) or "the top level"
        known = f"{homes[0]}/{escape(member.name)}"
        effect = f", so {absent(known)}" if len(homes) == 1 and not document.has(known) else ""
        yield Hit(
            member.pointer,
            f"{member.name} belongs in {where}; in {here} DeepSpeed {'refuses' if refused(member) else 'ignores'} it"
            f"{'' if refused(member) else effect}",
            remedy=f"move it to {where}",
            on_key=True,
            raises="parse" if refused(member) else None,
        )


@rule("DSP005", "removed-key", severity=ERROR, keys=[], raises="parse")
def removed_key(document: Document) -> Iterator[Hit]:
    """A block that DeepSpeed has removed must go, even where it is switched off.

    Why:    DeepSpeed refuses the configuration by the mere presence of the key: false, null and {} count too.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "amp": {"enabled": false}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "bf16": {"enabled": true}}
    Fix:    none
    Source: deepspeed/runtime/config.py, _initialize_params; github.com/deepspeedai/DeepSpeed/issues/8489
    """
    for member in members(document):
        if member.node and "x-removed" in member.node and member.pointer != "/optimizer/params/max_grad_norm":
            what = member.node["description"].removeprefix("Removed: ").rstrip(".")
            use = member.node.get("x-use")
            yield Hit(
                member.pointer,
                f"{title(member.pointer)} was removed from DeepSpeed, which refuses the file while the key is there ({what})",
                remedy=f"write {title(use)}" if use else "remove it",
                on_key=True,
            )


@rule("DSP006", "duplicate-key", severity=ERROR, keys=[])
def duplicate_key(document: Document, reader: str) -> Iterator[Hit]:
    """A key may stand once in its object.

    Why:    DeepSpeed refuses the file. HF Trainer and Accelerate silently keep the last one.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "train_batch_size": 16}
    Good:   {"train_batch_size": 16, "gradient_clipping": 1.0}
    Fix:    none
    Source: deepspeed/runtime/config_utils.py, dict_raise_error_on_duplicate_keys
    """
    for duplicate in document.duplicates:
        name, line = steps(duplicate.pointer)[-1], duplicate.first.line
        refused = reader == "deepspeed" and document.dialect != "yaml"  # PyYAML keeps the last one
        fate = "DeepSpeed refuses the file" if refused else "only this one counts"
        yield Hit(
            duplicate.pointer,
            f"key {shape(name)} stands here a second time (first in line {line}); {fate}",
            remedy="remove one of the two",
            severity=ERROR if refused else WARNING,
            raises="load" if refused else None,
            span=duplicate.again,
        )


@rule("DSP009", "not-an-object", severity=ERROR, keys=[], raises="parse")
def not_an_object(document: Document) -> Iterator[Hit]:
    """The top level must be an object with keys.

    Why:    A list or null fails with an AttributeError; an empty file counts as {} and then lacks a batch size.
    Bad:    [1]
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0}
    Fix:    none
    Source: deepspeed/runtime/config.py, DeepSpeedConfig
    """
    value = document.value
    if value == {} and not document.text.strip(BOM + " \t\r\n"):
        yield Hit("", "the file is empty; DeepSpeed reads it as {} and then asks for a batch size")
    elif not isinstance(value, dict):
        yield Hit("", f"the top level is {shape(value)}, but must be an object")


@rule("DSP010", "key-not-read", severity=ERROR, keys=[])
def key_not_read(document: Document) -> Iterator[Hit]:
    """Names from other versions, tutorials and help texts that DeepSpeed does not read.

    Why:    DeepSpeed ignores them without a word. Error where another key says what was meant, else warning.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "gradient_accumulation_dtype": "fp32"}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "data_types": {"grad_accum_dtype": "fp32"}}
    Fix:    none
    Source: deepspeed/runtime/config.py, _initialize_params
    """
    for member in members(document):
        if member.node is None or "x-unread" not in member.node:
            continue
        use = member.node.get("x-use")
        said = f"{title(member.pointer)} is not read by DeepSpeed"
        if use:
            counts = f"; the key is {title(use)}" + ("" if document.has(use) else f", and {absent(use)}")
            yield Hit(member.pointer, said + counts, remedy=f"write {title(use)}", on_key=True)
        else:
            reason = member.node["description"].rstrip(".")
            yield Hit(member.pointer, f"{said} ({reason})", on_key=True, severity=WARNING)


@rule("DSP011", "deprecated-key", severity=WARNING, keys=[])
def deprecated_key(document: Document, reader: str) -> Iterator[Hit]:
    """Old names that DeepSpeed still maps to new ones.

    Why:    DeepSpeed warns in its log, and refuses old and new name together. zero_optimization true or false is an error
            under HF Trainer and Accelerate, which look for the stage in it and raise an AttributeError.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2, "cpu_offload": true}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    Fix:    safe
    Source: deepspeed/runtime/zero/config.py, DeepSpeedZeroConfig
    """
    flag = document.at("/zero_optimization")
    if isinstance(flag, bool):
        block = json.dumps({"stage": int(flag)})
        yield Hit(
            "/zero_optimization",
            f"zero_optimization is {json.dumps(flag)}, an old form that means zero_stage {int(flag)}"
            + ("" if reader == "deepspeed" else "; HF and Accelerate look for the stage in it and fail"),
            remedy=f"write {block}",
            fix=replaced(document.values_at["/zero_optimization"], block),
            severity=WARNING if reader == "deepspeed" else ERROR,
            raises=None if reader == "deepspeed" else "load",
        )
    for member in members(document):
        if member.node is None or not member.node.get("deprecated") or CLOSED & member.node.keys():
            continue
        use = member.node.get("x-use")
        if use is None or (member.name == "bfloat16" and document.at("/bf16") is not None):
            continue
        new = steps(use)[-1]
        if document.has(use) and title(use) != "bf16":
            continue  # both: another rule
        fix, remedy = None, f"write {new}"
        if member.name in ("cpu_offload", "cpu_offload_param") and isinstance(member.value, bool):
            block = json.dumps({"device": "cpu" if member.value else "none"})
            remedy = f'write "{new}": {block}'
            edits = renamed(document, member, new).edits + replaced(document.values_at[member.pointer], block).edits
            fix = Fix(safe=True, edits=edits)
        elif use.rpartition("/")[0] == member.block_pointer and not document.has(use):
            fix = renamed(document, member, new)
        yield Hit(
            member.pointer,
            f"{title(member.pointer)} is an old name of {title(use)}",
            remedy=remedy,
            on_key=True,
            fix=fix,
        )


@rule("DSP012", "two-names-for-one", severity=ERROR, keys=["/zero_optimization"], raises="parse")
def two_names(document: Document) -> Iterator[Hit]:
    """A key and its other name may not both be there.

    Why:    DeepSpeed refuses the block.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3, "prefetch_bucket_size": 100, "stage3_prefetch_bucket_size": 200}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 200}}
    Fix:    none
    Source: deepspeed/runtime/zero/config.py (aliases); deepspeed/runtime/config_utils.py, _process_deprecated_field
    """
    for member in members(document):
        node = member.node or {}
        if member.value == "auto":
            continue
        other = None
        if "x-alias-of" in node:
            other = f"{member.block_pointer}/{node['x-alias-of']}"
        elif node.get("deprecated") and member.strict and "x-use" in node and "/zero_optimization/" in node["x-use"]:
            other = node["x-use"]
        if other and document.has(other) and document.at(other) != "auto":
            yield Hit(
                member.pointer,
                f"{member.name} and {steps(other)[-1]} are two names for one thing; DeepSpeed refuses both together",
                remedy=f"remove {member.name}",
                on_key=True,
            )


@rule("DSP015", "byte-order-mark", severity=WARNING, keys=[])
def byte_order_mark(document: Document, reader: str) -> Iterator[Hit]:
    """The file should not start with a byte-order mark.

    Why:    DeepSpeed reads over it; HF Trainer and Accelerate fail on it.
    Bad:    \\ufeff{"train_batch_size": 8, "gradient_clipping": 1.0}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0}
    Fix:    safe
    Source: transformers/integrations/deepspeed.py, HfDeepSpeedConfig (json.load)
    """
    if document.text.startswith(BOM) and document.dialect in ("json", "hjson"):
        yield Hit(
            "",
            "the file starts with a byte-order mark; HF Trainer and Accelerate cannot read it",
            remedy="save it without one",
            raises=None if reader == "deepspeed" else "load",
            fix=None if document.text.startswith(2 * BOM) else replaced((0, 1), ""),
        )


def one_of(words: list[str]) -> str:
    """Words as a sentence lists them: a, b or c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
