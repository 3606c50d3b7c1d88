"""What estimate answers beside its table, as people read it. Pure: value -> string."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsplan.schemas.units import size
from tabulate import tabulate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsplan.schemas.answers import Asked, Explanation, LengthsAnswer, Probe, Reach
    from dsplan.schemas.plan import Plan

_NAMES: dict[Asked, str] = {"max micro-batch": "micro_batch", "max seq-len": "sequence", "min gpus": "GPUs"}


def row_name(plan: Plan) -> str:
    """As a row is spoken of: "zero 2, bf16, dp 8"."""
    return f"zero {plan.zero_stage}, {plan.precision}, {plan.layout}"


def answers_text(answers: Sequence[Reach]) -> str:
    """A paragraph per answer."""
    return "\n".join(line for answer in answers for line in _answer(answer))


def _answer(reach: Reach) -> list[str]:
    head = f"{reach.asked}, {row_name(reach.plan)}"
    if reach.asked == "max micro-batch":
        head += f", sequence {reach.plan.seq_len}" if reach.plan.seq_len else ""
    else:
        head += f", micro_batch {reach.plan.micro_batch}"
    if reach.answer is None:
        smallest = f"at {_named(reach, reach.next.value)}" if reach.next else "there"
        return [f"{head}: none; {smallest} it is {reach.stopped_by}"]
    lines = [f"{head}: {_named(reach, reach.answer.value)}: {_margin(reach.answer, reach.usable_bytes)}"]
    if reach.next is not None:
        lines.append(f"  {_subject(reach, reach.next.value)} does not fit: {reach.stopped_by}")
    else:
        lines.append(f"  no {'smaller' if reach.asked == 'min gpus' else 'larger'} one: {reach.stopped_by}")
    if not reach.answer.sure:
        sure = "no value is" if reach.sure_value is None else f"{_subject(reach, reach.sure_value)} is"
        high = size(reach.answer.device_bytes_high or 0)
        lines.append(f"  tight: it may take up to {high}; {sure} within what the GPU has by the upper bound too")
    lines += [f"  {note}" for note in reach.notes]
    return lines


def _named(reach: Reach, value: int) -> str:
    """A value as the answer speaks of it: "2 GPUs", and a micro-batch or a length by its number."""
    return f"{value} GPU{'' if value == 1 else 's'}" if reach.asked == "min gpus" else str(value)


def _subject(reach: Reach, value: int) -> str:
    return f"on {_named(reach, value)} it" if reach.asked == "min gpus" else _named(reach, value)


def _margin(probe: Probe, usable_bytes: int) -> str:
    assert probe.device_bytes is not None and probe.room_bytes is not None
    return f"{size(probe.device_bytes)} of {size(usable_bytes)}, {size(probe.room_bytes)} left"


def lengths_text(answer: LengthsAnswer) -> str:
    """The worst batch, then the shares."""
    worst, plan = answer.worst, answer.plan
    at = (
        f"line {answer.worst_first_line}"
        if answer.worst_first_line == answer.worst_last_line
        else f"lines {answer.worst_first_line}-{answer.worst_last_line}"
    )
    of_lines = "each line is a micro-batch"
    if plan.micro_batch > 1:
        of_lines = f"{plan.micro_batch} lines after one another make a micro-batch, padded to its longest"
    lines = [
        f"lengths of {answer.source}, {row_name(plan)}: {answer.samples} samples; {of_lines}; "
        f"{plan.accumulation * plan.layout.dp} of those a step"
        + ("; the last, of fewer lines, counts as a whole one" if answer.samples % plan.micro_batch else ""),
        f"  the worst, {at}, is padded to {worst.value}: {_worst(worst)}",
    ]
    if answer.steps_over is None or answer.micro_batches_over is None:
        lines.append("  how many go over takes a kind of GPU in --cluster, such as 8xA100-80GB")
    elif not answer.micro_batches_over:
        lines.append(f"  all {answer.steps} steps fit")
    else:
        limit = "none fits" if answer.limit_length is None else f"the longest that fits is {answer.limit_length}"
        lines.append(
            f"  over the limit: {answer.steps_over} of {answer.steps} steps ({answer.steps_over / answer.steps:.1%}), "
            f"{answer.micro_batches_over} of {answer.micro_batches} micro-batches "
            f"({answer.micro_batches_over / answer.micro_batches:.1%}); of the lengths that batches have, {limit}"
        )
    return "\n".join(lines)


def _worst(worst: Probe) -> str:
    if worst.device_bytes is None or worst.room_bytes is None:
        return f"{size(worst.device_bytes or 0)} on a GPU"
    if worst.fits:
        return f"{size(worst.device_bytes)} on a GPU, {size(worst.room_bytes)} left"
    if worst.room_bytes < 0:
        return f"{size(worst.device_bytes)} on a GPU, {size(-worst.room_bytes)} more than it has"
    return worst.why


def explanation_text(explain: Explanation) -> str:
    """The verdict block."""
    whose = "your configuration" if explain.own else "the best row"
    lines = [f"{whose}, {row_name(explain.plan)}: {explain.verdict}{_room(explain)}"]
    others = ", ".join(f"{phase} {size(held)}" for phase, held in explain.phases if phase != explain.phase)
    peak = next((held for phase, held in explain.phases if phase == explain.phase), 0)
    where = explain.where if explain.phase in explain.where else f"{explain.phase}, {explain.where}"
    lines.append(f"  decided in {where}: {size(peak)} allocated")
    if others:
        lines.append(f"  other phases: {others}")
    rows = [(item.category, size(item.bytes), item.why) for item in explain.largest]
    table = tabulate(rows, tablefmt="plain", colalign=("left", "right", "left"), disable_numparse=True)
    lines += [f"    {line}" for line in table.splitlines()]
    lines += [host] if (host := _host(explain)) else []
    lines += [f"  {_reach(reach)}" for reach in explain.reach]
    if explain.changes:
        lines.append("  what would make it fit, the smallest change first (each evaluated):")
        rows = [
            (change.what, f"{size(change.device_bytes)}, {change.verdict}", change.costs) for change in explain.changes
        ]
        table = tabulate(rows, tablefmt="plain", disable_numparse=True)
        lines += [f"    {line}" for line in table.splitlines()]
    if explain.no_change:
        lines.append(f"  {explain.no_change}")
    return "\n".join(lines)


def _room(explain: Explanation) -> str:
    parts = []
    if explain.room_bytes is not None and explain.usable_bytes is not None:
        room = explain.room_bytes
        left = f"{size(room)} left" if room >= 0 else f"{size(-room)} more than there is"
        parts.append(f"{left} of a GPU's {size(explain.usable_bytes)}")
    return f"; {'; '.join(parts)}" if parts else ""


def _host(explain: Explanation) -> str:
    """What a node's host takes, phase by phase, and what that leaves."""
    told = ", ".join(f"{phase} {size(held)}" for phase, held in explain.host_phases if held)
    room = explain.host_room_bytes
    left = "" if room is None else f"; {size(room)} left" if room >= 0 else f"; {size(-room)} more than a node has"
    return f"  host memory per node: {told}{left}" if told else ""


def _reach(reach: Reach) -> str:
    name = _NAMES[reach.asked]
    if reach.answer is None:
        return f"{name}: none fits"
    ends = f"{reach.next.value}: {reach.stopped_by}" if reach.next is not None else reach.stopped_by
    sure = (
        ""
        if reach.answer.sure or not reach.exact
        else f", for sure to {reach.sure_value}"
        if reach.sure_value
        else ", none for sure"
    )
    far = f"{name} fits up to {reach.answer.value}" if reach.exact else f"{name} {reach.answer.value} fits"
    return f"{far}{sure} ({ends})"
