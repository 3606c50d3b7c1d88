"""DSP05x: keys that another release of DeepSpeed reads, and what changes from one release to the next."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from dsplan.planner.rules.known_keys import Member, members, title
from dsplan.planner.rules.mechanism import ERROR, INFO, WARNING, Hit, replaced, rule
from dsplan.planner.rules.structure import near
from dsplan.schemas.finding import Edit, Finding, Fix
from dsplan.schemas.known_keys import child, lookup
from dsplan.schemas.positions import Document, escape, steps

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dsplan.schemas.releases import Upgrade


@rule("DSP050", "key-of-later-release", severity=ERROR, keys=[])
def key_of_later_release(document: Document, release: str) -> Iterator[Hit]:
    """A key must be one that the release in use reads.

    Why:    A release from before the key refuses it in a block that it checks, and ignores it without a word elsewhere (then
            this is a warning).
    Given:  release 0.14.5
    Bad:    {"train_batch_size": 8, "zero_optimization": {"stage": 3, "log_trace_cache_warnings": true}}
    Good:   {"train_batch_size": 8, "zero_optimization": {"stage": 3}}
    Fix:    none
    Source: tests/oracle/ask_releases.py, which asks the releases themselves
    """
    for member in members(document):
        later = (member.node or {}).get("x-later")
        if later is None:
            continue
        said = f"{title(member.pointer)} is a key of DeepSpeed {later} and later; {release}"
        if member.strict and member.value != "auto":
            yield Hit(member.pointer, f"{said} refuses it", remedy="remove it", on_key=True, raises="parse")
        else:
            yield Hit(member.pointer, f"{said} ignores it", on_key=True, severity=WARNING)


@rule("DSP051", "key-of-earlier-release", severity=INFO, keys=[])
def key_of_earlier_release(document: Document, release: str) -> Iterator[Hit]:
    """A key that this release takes, and a later one does not.

    Why:    The file is right today, and fails (or silently does less) after an upgrade.
    Given:  release 0.14.5
    Bad:    {"train_batch_size": 8, "amp": {"enabled": true}}
    Good:   {"train_batch_size": 8, "fp16": {"enabled": true}}
    Fix:    none
    Source: tests/oracle/ask_releases.py, which asks the releases themselves
    """
    from dsplan.schemas.releases import status_at

    for member in members(document):
        gone = (member.node or {}).get("x-gone")
        if gone is not None:
            fate = "refuse" if status_at(member.pointer, gone) == "refused" else "ignore"
            yield Hit(member.pointer, f"DeepSpeed {gone} and later {fate} {title(member.pointer)}", on_key=True)


@rule("DSP052", "refused-after-upgrade", severity=ERROR, keys=[])
def refused_after_upgrade(document: Document, upgrade: Upgrade) -> Iterator[Hit]:
    """A key that the old release takes and the new one refuses.

    Why:    The new release raises when it reads the file, in the first job after the upgrade.
    Given:  from 0.14.5
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "steps_per_print": 10, "amp": {"enabled": false}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "steps_per_print": 10}
    Fix:    none
    Source: tests/oracle/ask_releases.py, which asks the releases themselves
    """
    for member, before, after in _moved(document, upgrade):
        if before != "refused" and after == "refused":
            use = _instead(member)
            yield Hit(
                member.pointer,
                f"{title(member.pointer)} is {_taken(before)} by DeepSpeed {upgrade.before} and refused by {upgrade.after}",
                remedy=f"write {use}" if use else "remove it",
                on_key=True,
                raises="parse",
            )


@rule("DSP053", "idle-after-upgrade", severity=WARNING, keys=[])
def idle_after_upgrade(document: Document, upgrade: Upgrade) -> Iterator[Hit]:
    """A key that the old release reads and the new one does not look at.

    Why:    What the key says no longer happens, and nobody is told.
    Given:  from 0.14.5
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "steps_per_print": 10, "seq_parallel_comm_data_type": "fp32"}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "steps_per_print": 10}
    Fix:    none
    Source: tests/oracle/ask_releases.py, which asks the releases themselves
    """
    for member, before, after in _moved(document, upgrade):
        if before == "read" and after == "ignored":
            use = _instead(member)
            yield Hit(
                member.pointer,
                f"{title(member.pointer)} is read by DeepSpeed {upgrade.before} and ignored by {upgrade.after}",
                remedy=f"write {use}" if use else "",
                on_key=True,
            )


SET_BY_ACCELERATE = ("/steps_per_print", "/zero_allow_untested_optimizer")
"""Whatever the file says. Source: accelerate/accelerator.py, _prepare_deepspeed."""


@rule("DSP054", "value-changed-by-upgrade", severity=WARNING, keys=[])
def value_changed_by_upgrade(document: Document, upgrade: Upgrade, reader: str) -> Iterator[Hit]:
    """A value that changes with the release although the file does not, since the file does not say it.

    Why:    The default is another one in the new release. The job trains (or prints, or holds memory) another way, silently.
    Given:  from 0.14.5
    Bad:    {"train_batch_size": 8, "steps_per_print": 10}
    Good:   {"train_batch_size": 8, "gradient_clipping": 0.0, "steps_per_print": 10}
    Fix:    safe: writes the old value.
    Source: tests/oracle/ask_releases.py, which asks the releases themselves
    """
    from dsplan.schemas.releases import changed_keys, default_at, status_at

    for pointer in changed_keys():
        block = pointer.rpartition("/")[0]
        if status_at(pointer, upgrade.after) not in ("read", None) or not _in_use(document, block):
            continue
        before, after = default_at(pointer, upgrade.before), default_at(pointer, upgrade.after)
        if before == after or not _unsaid(document, pointer) or not _reached(document, pointer):
            continue
        if pointer in SET_BY_ACCELERATE and reader != "deepspeed":
            continue
        name = title(pointer)
        came = "" if status_at(pointer, upgrade.before) in ("read", None) else " (which has no such key)"
        yield Hit(
            pointer,
            f"{name} is not set: it is {json.dumps(before)} in DeepSpeed {upgrade.before}{came} and {json.dumps(after)} in "
            f"{upgrade.after}",
            remedy=f'write "{steps(pointer)[-1]}": {json.dumps(before)} to keep the old value',
            fix=None if before is None else inserted(document, pointer, before),
        )


@rule("DSP055", "checked-after-upgrade", severity=ERROR, keys=[])
def checked_after_upgrade(document: Document, upgrade: Upgrade) -> Iterator[Hit]:
    """An unknown key in a block that ignored it before and refuses it now.

    Why:    Blocks that took anything (fp16 and bf16 until 0.17) are checked in later releases.
    Given:  from 0.14.5
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "steps_per_print": 10, "fp16": {"enabled": true, "opt_level": "O2"}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "steps_per_print": 10, "fp16": {"enabled": true}}
    Fix:    none
    Source: tests/oracle/ask_releases.py, which asks the releases themselves
    """
    from dsplan.schemas.releases import changes_of, holds

    for member in members(document):
        unknown = changes_of(member.block_pointer).get("unknown", {})
        if member.node is None and member.value != "auto" and unknown:
            before, after = (holds(unknown, release) for release in (upgrade.before, upgrade.after))
            if before == "ignored" and after == "refused":
                yield Hit(
                    member.pointer,
                    f"{title(member.pointer)} is no key: DeepSpeed {upgrade.before} ignores it and {upgrade.after} refuses it",
                    remedy="remove it",
                    on_key=True,
                    raises="parse",
                )


def _moved(document: Document, upgrade: Upgrade) -> Iterator[tuple[Member, str | None, str | None]]:
    """Each member whose key is not the same in both releases, and what each makes of it."""
    from dsplan.schemas.releases import status_at

    for member in members(document):
        before, after = (status_at(member.pointer, release) for release in (upgrade.before, upgrade.after))
        if before != after:
            yield member, before, after


def _instead(member: Member) -> str | None:
    """The key that says the same in the new release, where it is known."""
    if member.node is None:
        return near(member)
    use = member.node.get("x-use")
    return title(use) if use else None


def _taken(status: str | None) -> str:
    return "read" if status == "read" else "ignored"


def _in_use(document: Document, block: str) -> bool:
    """The block is there and on: what is absent or switched off has no effective values to change."""
    if not isinstance(document.value, dict):
        return False
    if not block:
        return bool(document.value)
    held = document.at(block)
    if not isinstance(held, dict) or (block == "/bfloat16" and document.at("/bf16") is not None):
        return False
    known = lookup(block)
    if child(known, "enabled") is not None and held.get("enabled", (child(known, "enabled") or {}).get("default")) in (
        False,
        None,
        "false",
    ):
        return False
    if child(known, "device") is not None and held.get("device", "none") in ("none", None, "auto"):
        return False
    return _in_use(document, block.rpartition("/")[0])


STAGES = {
    "/bf16/check_grad_overflow": (1, 2),
    "/bf16/immediate_grad_update": (0, 1),
    "/zero_optimization/offload_optimizer/pin_memory": (1, 2, 3),
    "/zero_optimization/offload_param/pin_memory": (3,),
}
"""ZeRO stages at which the value reaches anything. Source: deepspeed/runtime/engine.py, _configure_zero_optimizer, _configure_bf16_optimizer."""


def _reached(document: Document, pointer: str) -> bool:
    """The value has an effect at the file's zero_stage, as far as that is known."""
    stage = document.at("/zero_optimization/stage", 0)
    stages = STAGES.get(pointer.replace("/bfloat16/", "/bf16/"), ())
    return not stages or stage in stages or stage not in (0, 1, 2, 3)


def _unsaid(document: Document, pointer: str) -> bool:
    """Neither the key nor another name of it says the value; "auto" says none where the block drops it."""
    block, _, _ = pointer.rpartition("/")
    node, own = lookup(block) or {}, lookup(pointer) or {}
    if "x-alias-of" in own:
        return False  # told of the key itself
    if document.has(pointer):
        dropped = node.get("x-unknown") == "refused" and "x-auto" not in own
        return dropped and document.at(pointer) == "auto"
    aliases = [
        name for name, other in node.get("properties", {}).items() if other.get("x-alias-of") == steps(pointer)[-1]
    ]
    return not any(document.has(f"{block}/{escape(name)}") for name in aliases)


def inserted(document: Document, pointer: str, value: Any) -> Fix | None:
    """A fix that writes the key as the first of its block, laid out as the one that is first now; over "auto" in its place.

    None where the block is not there, or the text is not of JSON's kind.
    """
    if document.dialect not in ("json", "hjson"):
        return None
    if document.has(pointer):
        return replaced(document.values_at[pointer], json.dumps(value))
    block = pointer.rpartition("/")[0]
    pair = f"{json.dumps(steps(pointer)[-1])}: {json.dumps(value)}"
    own = [at for at in document.keys_at if at.rpartition("/")[0] == block]
    if not own:
        start, end = document.values_at[block]
        if document.text[start : start + 1] != "{" or end == start:
            return None
        return Fix(safe=True, edits=(Edit(start=start + 1, end=start + 1, text=pair),))
    first = min(document.keys_at[at][0] for at in own)
    line = document.text.rfind("\n", 0, first) + 1
    indent = document.text[line:first]
    between = f",\n{indent}" if not indent.strip(" \t\ufeff") and line else ", "
    return Fix(safe=True, edits=(Edit(start=first, end=first, text=pair + between),))


RELEASE_RULES = ("DSP050", "DSP051", "DSP052", "DSP053", "DSP054", "DSP055")


def told_once(document: Document, findings: Sequence[Finding]) -> list[Finding]:
    """Without what other rules say of a key that this release does not read, or that the upgrade rules speak of."""
    closed = {member.pointer for member in members(document) if "x-later" in (member.node or {})}
    spoken = {finding.pointer for finding in findings if finding.rule in ("DSP052", "DSP053", "DSP054", "DSP055")}

    def again(finding: Finding) -> bool:
        if finding.rule in RELEASE_RULES:
            return False
        if finding.rule == "DSP202":  # it speaks of the same default
            return "/gradient_clipping" in spoken
        if finding.rule in ("DSP001", "DSP002", "DSP005", "DSP010") and finding.pointer in spoken:
            return True
        return any(finding.pointer == at or finding.pointer.startswith(f"{at}/") for at in closed)

    return [finding for finding in findings if not again(finding)]
