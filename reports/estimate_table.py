"""An Estimate as people read it: two lines that say for what, then a table. Pure: value -> string."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from dsplan.reports.answers_text import answers_text, explanation_text, lengths_text, row_name
from dsplan.schemas.optimizer import kernel_of
from dsplan.schemas.units import MIB, count, flops, in_unit, seconds, size, table_unit
from tabulate import tabulate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsplan.schemas.estimate import Estimate, Row
    from dsplan.schemas.ledger import Moment

MOST_ROWS = 8
"""What text shows without --all."""

_HEADERS = (
    "zero",
    "prec",
    "dp",
    "tp",
    "pp",
    "params",
    "grads",
    "optim",
    "activ",
    "gathered",
    "buckets",
    "temp",
    "allocated",
    "device (low-high)",
    "host",
    "step",
    "tokens/s/GPU",
    "MFU",
    "verdict",
)


def shown_rows(estimate: Estimate, *, everything: bool) -> tuple[Row, ...]:
    """The user's own row first, then at most MOST_ROWS: fitting ones first, fastest first."""
    if everything or len(estimate.rows) <= MOST_ROWS + (estimate.own is not None):
        return estimate.rows
    own = [estimate.rows[estimate.own]] if estimate.own is not None else []
    others = [row for row in estimate.rows if row not in own]
    return tuple(own + sorted(others, key=_rank)[:MOST_ROWS])


def best_row(estimate: Estimate) -> Row:
    """The user's own row; else the fastest of those that fit."""
    return min(estimate.rows, key=_rank) if estimate.own is None else estimate.rows[estimate.own]


def _rank(row: Row) -> tuple[int, bool, float, int]:
    order = {"fits": 0, "tight": 1, "unknown": 2, "host_oom": 3, "oom": 4}
    speed = row.time.samples_per_second or 0.0
    return order[row.verdict], not row.runnable, -speed, row.memory.device_bytes or 0


def as_text(estimate: Estimate, *, everything: bool = False, formulas: bool = False) -> str:
    """The report for a terminal. everything: all rows; formulas: the formula of every item of the rows shown."""
    rows = shown_rows(estimate, everything=everything)
    parts = [_head(estimate, rows), _table(estimate, rows, "simple"), _legend(estimate, rows)]
    return "\n\n".join((*parts, *_beside(estimate, rows, formulas)))


def _beside(estimate: Estimate, rows: Sequence[Row], formulas: bool) -> list[str]:
    """What follows the table: ranks, the verdict, answers, formulas; a text each."""
    parts = [_stages(estimate, rows)] if estimate.per_rank else []
    parts += map(explanation_text, estimate.explain)
    parts += [answers_text(estimate.answers)] if estimate.answers else []
    parts += map(lengths_text, estimate.lengths)
    parts += [_formulas(row) for row in rows] if formulas else []
    return [part for part in parts if part]


def as_markdown(estimate: Estimate, *, everything: bool = False, formulas: bool = False) -> str:
    """The same as GitHub markdown: what follows the table stands in blocks of text."""
    rows = shown_rows(estimate, everything=everything)
    parts = [_head(estimate, rows), _table(estimate, rows, "github"), _legend(estimate, rows)]
    parts += [f"```text\n{text}\n```" for text in _beside(estimate, rows, formulas)]
    return "\n\n".join(parts)


def as_json(estimate: Estimate, *, formulas: bool = False) -> str:
    """The contract's JSON, all rows. formulas: each with the items of every phase."""
    return json.dumps(estimate.to_json(formulas=formulas), indent=2)


def _table(estimate: Estimate, rows: Sequence[Row], style: str) -> str:
    """Columns in which no row has anything to say are left out."""
    cells = _cells(estimate, rows)
    kept = [index for index in range(len(cells[0])) if any(line[index] != "-" for line in cells)]
    return tabulate(
        [[line[index] for index in kept] for line in cells],
        headers=[_headers(rows)[index] for index in kept],
        tablefmt=style,
        stralign="right",
        disable_numparse=True,
    )


def _head(estimate: Estimate, rows: Sequence[Row]) -> str:
    model, plan = estimate.model, rows[0].plan
    frozen = "" if model.trainable_params == model.params else f", {count(model.trainable_params)} trainable"
    forward = (
        "no sample batch"
        if model.forward_flops is None
        else f"forward {flops(model.forward_flops)} by {model.flops_source}"
    )
    levels = " and ".join(dict.fromkeys(row.level for row in rows))
    optimizer = plan.optimizer.label
    return (
        f"engine {estimate.engine} {estimate.engine_version} ({levels}); model {model.source}: "
        f"{model.params:,} parameters{frozen}; {forward}\n"
        f"batch: {_batch(rows)}; sequence {plan.seq_len or '-'}; recompute {plan.recompute}; offload {plan.offload}; "
        f"optimizer {optimizer} ({kernel_of(plan.optimizer)}){_ways(rows)}; cluster: {estimate.cluster}"
    )


def _ways(rows: Sequence[Row]) -> str:
    """What else was chosen of how the work is split, where it has an effect in some row."""
    plan, layout = rows[0].plan, rows[0].plan.layout
    said = [f"dp_replicate {layout.dp_replicate}"] if layout.dp_replicate > 1 else []
    said += [f"sp {layout.sp}"] if layout.sp > 1 else []
    if any(row.plan.layout.pp > 1 for row in rows) and plan.schedule != "1f1b":
        chunks = f" of {plan.virtual_stages} virtual stages" if plan.virtual_stages > 1 else ""
        said.append(f"schedule {plan.schedule}{chunks}")
    said += ["sequence parallel with tp"] if any(row.plan.sequence_parallel for row in rows) else []
    return "".join(f"; {part}" for part in said)


def _batch(rows: Sequence[Row]) -> str:
    """The batch product; a span where rows differ."""
    plan = rows[0].plan

    def span(values: Sequence[int]) -> str:
        low, high = min(values), max(values)
        return str(low) if low == high else f"{low}-{high}"

    plans = [row.plan for row in rows]
    if len({(p.micro_batch, p.accumulation, p.layout.dp) for p in plans}) == 1:
        return f"global {plan.global_batch} = micro_batch {plan.micro_batch} x accumulation {plan.accumulation} x dp {plan.layout.dp}"
    return (
        f"global {span([p.global_batch for p in plans])} = micro_batch {span([p.micro_batch for p in plans])} x "
        f"accumulation {span([p.accumulation for p in plans])} x dp {span([p.layout.dp for p in plans])}"
    )


def _cells(estimate: Estimate, rows: Sequence[Row]) -> list[list[str]]:
    _, unit = _unit(rows)
    cells = []
    for index, row in enumerate(rows):
        memory, plan = row.memory, row.plan
        own = estimate.own is not None and index == 0
        device = in_unit(memory.device_bytes, unit)
        if memory.device_bytes is not None:
            device += f" ({in_unit(memory.device_bytes_low, unit)}-{in_unit(memory.device_bytes_high, unit)})"
        tokens = row.time.tokens_per_second_per_gpu
        cells.append(
            [
                f"{'> ' if own else ''}{plan.zero_stage}",
                plan.precision,
                str(plan.layout.dp),
                str(plan.layout.tp),
                str(plan.layout.pp),
                in_unit(memory.params_bytes, unit),
                in_unit(memory.grads_bytes, unit),
                in_unit(memory.optimizer_bytes, unit),
                in_unit(memory.activations_bytes, unit),
                in_unit(memory.gathered_params_bytes, unit),
                in_unit(memory.buckets_bytes, unit),
                in_unit(memory.temporary_bytes, unit),
                in_unit(memory.allocated_bytes, unit),
                device,
                in_unit(memory.host_bytes, unit) if memory.host_bytes else "-",
                seconds(row.time.step_seconds),
                "-" if tokens is None else f"{tokens:,.0f}",
                "-" if row.time.mfu is None else f"{row.time.mfu:.0%}",
                row.verdict + ("" if row.runnable else " *"),
                *([row.level] if _mixed(rows) else []),
            ]
        )
    return cells


def _headers(rows: Sequence[Row]) -> tuple[str, ...]:
    return (*_HEADERS, "level") if _mixed(rows) else _HEADERS


def _mixed(rows: Sequence[Row]) -> bool:
    return len({row.level for row in rows}) > 1


def _footer(estimate: Estimate, rows: Sequence[Row]) -> str:
    unit = _unit(rows)[0]
    text = f"{unit} per GPU on the fullest rank, at the one moment of its peak (--formulas says which).\n"
    text += "device: what nvidia-smi shows, with the share of the allocator, CUDA and the communicators, and its likely span."
    if any(row.memory.host_bytes for row in rows):
        text += f" host: {unit} per node."
    if estimate.cluster.gpu is None:
        text += " A verdict and a time need a kind of GPU, as in --cluster 8xA100-80GB."
    return text


def _unit(rows: Sequence[Row]) -> tuple[str, int]:
    """Of every column of bytes: what suits those allocated, but no less than MiB beside those of the device."""
    largest = max(row.memory.allocated_bytes or row.memory.optimizer_bytes or 0 for row in rows)
    has_device = any(row.memory.device_bytes is not None for row in rows)
    return table_unit(max(largest, MIB) if has_device else largest)


def _legend(estimate: Estimate, rows: Sequence[Row]) -> str:
    lines = [_footer(estimate, rows)]
    if estimate.own is not None:
        lines[0] += " > marks your own configuration."
    if any(not row.runnable for row in rows):
        lines.append(f"* is not carried out by engine {estimate.engine} yet: dsplan launch would refuse it.")
    hidden = len(estimate.rows) - len(rows)
    if hidden:
        lines.append(f"{hidden} more row{'s' if hidden > 1 else ''}: --all shows them.")
    for reason, rows_left_out in estimate.skipped.items():
        lines.append(f"left out, {rows_left_out} rows: {reason}")
    return "\n".join(lines)


def _stages(estimate: Estimate, rows: Sequence[Row]) -> str:
    """Every pipeline stage of each row that has several; of the others, a line."""
    unit, divisor = _unit(rows)
    headers = (
        "row",
        "pp_stage",
        "ranks",
        "params",
        "grads",
        "optim",
        "activ",
        "gathered",
        "buckets",
        "temp",
        "allocated",
    )
    cells = []
    for stage in estimate.per_rank:
        last = stage.plan.layout.pp - 1
        end = "" if last == 0 else " first" if stage.pp_stage == 0 else " last" if stage.pp_stage == last else ""
        memory = stage.memory
        held = (
            memory.params_bytes,
            memory.grads_bytes,
            memory.optimizer_bytes,
            memory.activations_bytes,
            memory.gathered_params_bytes,
            memory.buckets_bytes,
            memory.temporary_bytes,
            memory.allocated_bytes,
        )
        cells.append(
            [
                row_name(stage.plan),
                f"{stage.pp_stage}{end}",
                str(stage.ranks),
                *(in_unit(value, divisor) for value in held),
                in_unit(memory.device_bytes, divisor),
                stage.verdict + (", the fullest" if stage.fullest and last else ""),
                stage.where,
            ]
        )
    table = tabulate(
        cells,
        headers=(*headers, "device", "verdict", "peak in"),
        tablefmt="simple",
        disable_numparse=True,
        colalign=("left", "left", *("right",) * 10, "left", "left"),
    )
    return f"per pipeline stage, {unit} on each of its ranks, which are alike (formula):\n\n{table}"


def _formulas(row: Row) -> str:
    title = row_name(row.plan)
    if row.ledger is None or not row.ledger.moments:
        return f"{title}: no formula"
    peak = row.ledger.peak
    lines = [f"{title}: peak in {peak.where}, {size(peak.allocated_bytes)}", *_items(peak)]
    for moment in row.ledger.moments:
        if moment is not peak:
            where = moment.where if moment.phase in moment.where else f"{moment.phase}, {moment.where}"
            lines += [f"  {where}, {size(moment.allocated_bytes)}", *(f"  {line}" for line in _items(moment))]
    return "\n".join(lines)


def _items(moment: Moment) -> list[str]:
    return [f"  {item.category:<16} {size(item.bytes):>11}  {item.why}" for item in moment.items if item.bytes]
