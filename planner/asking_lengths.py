"""`--lengths FILE`: what batches of such samples take, each padded to its longest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from dsplan.planner.asking import needs_batch, needs_length, probe
from dsplan.planner.rows import Bench
from dsplan.planner.tables import position_table
from dsplan.schemas.answers import LengthsAnswer, Probe
from dsplan.schemas.plan import Plan
from dsplan.schemas.problem import Problem

MOST_NAMED = 3
"""Of bad lines."""


@dataclass(frozen=True, slots=True)
class Padded:
    """A micro-batch: the longest of its lines, and the numbers of the first and the last."""

    length: int
    first_line: int
    last_line: int


def read_lengths(path: str) -> tuple[int, ...]:
    """The lengths of a file, a line each. Problem that names the bad lines by number."""
    try:
        text = Path(path).read_text("utf-8-sig")
    except OSError as error:
        raise Problem(f"--lengths {path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise Problem(f"--lengths {path}: is not UTF-8 text; write one length a line") from error
    lines = text.rstrip().splitlines()
    wrong = [
        f"line {number} is {line.strip()!r}"
        for number, line in enumerate(lines, 1)
        if not (line.strip().isascii() and line.strip().isdigit() and int(line) > 0)
    ]
    if wrong:
        more = f" and {len(wrong) - MOST_NAMED} more" if len(wrong) > MOST_NAMED else ""
        raise Problem(
            f"--lengths {path}: {', '.join(wrong[:MOST_NAMED])}{more}, but each line must be one whole number of at least 1"
        )
    if not lines:
        raise Problem(f"--lengths {path}: is empty; write one length a line")
    return tuple(int(line) for line in lines)


def padded_batches(lengths: tuple[int, ...], size: int) -> list[Padded]:
    """`size` lines after one another make a micro-batch, which is padded to its longest. The last one may hold fewer lines."""
    return [
        Padded(max(lengths[start : start + size]), start + 1, min(start + size, len(lengths)))
        for start in range(0, len(lengths), size)
    ]


def lengths_answer(bench: Bench, plan: Plan, path: str) -> LengthsAnswer:
    """The worst micro-batch of the file, and the share of steps that go over what the GPU has.

    Lines are drawn in the order of the file: micro_batch lines make a micro-batch, dp x accumulation micro-batches a step. A
    step is over where one of its micro-batches is. Only lengths that the file makes are traced: the longest, and as many as
    it takes to find the longest that fits.
    """
    lengths = read_lengths(path)
    needs_length(bench, plan, "--lengths")
    needs_batch(bench, plan, "--lengths")
    table = position_table(bench.subject)
    if table and max(lengths) > table[0]:
        line = lengths.index(max(lengths)) + 1
        raise Problem(f"--lengths {path}: line {line} is {max(lengths)}, but {table[1]}; cut it to {table[0]}")
    batches = padded_batches(lengths, plan.micro_batch)
    known: dict[int, Probe] = {}

    def attempt(length: int) -> Probe:
        if length not in known:
            known[length] = probe(bench, replace(plan, seq_len=length), length)
        return known[length]

    longest = max(batches, key=lambda batch: batch.length)
    worst = attempt(longest.length)
    if worst.verdict == "refused":
        raise Problem(f"--lengths {path}: at length {longest.length} {worst.why}")
    limit: int | None = None
    over = None
    if bench.cluster.gpu is not None:
        limit = _limit(sorted({batch.length for batch in batches}), attempt)
        over = [limit is None or batch.length > limit for batch in batches]
    per_step = plan.layout.dp * plan.accumulation
    steps = [range(start, min(start + per_step, len(batches))) for start in range(0, len(batches), per_step)]
    return LengthsAnswer(
        source=path,
        samples=len(lengths),
        longest=max(lengths),
        plan=plan,
        worst=worst,
        worst_first_line=longest.first_line,
        worst_last_line=longest.last_line,
        limit_length=limit,
        micro_batches=len(batches),
        micro_batches_over=sum(over) if over is not None else None,
        steps=len(steps),
        steps_over=sum(any(over[i] for i in step) for step in steps) if over is not None else None,
        traced_lengths=tuple(sorted(known)),
    )


def _limit(distinct: list[int], attempt: Callable[[int], Probe]) -> int | None:
    """The longest of the lengths that fits, between two neighbours that were both traced; None: none does."""
    low, high = -1, len(distinct)
    index = high - 1  # the longest first: where it fits, all do
    while high - low > 1:
        if attempt(distinct[index]).fits:
            low = index
        else:
            high = index
        index = (low + high) // 2
    return distinct[low] if low >= 0 else None
