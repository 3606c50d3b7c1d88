"""Scores the memory formulas on published runs: `python benchmarks/score_published.py --data DIR [--json]`

DIR holds CSV files of one schema: row_id, model, layers, hidden, heads, kv_heads, ffn, vocab, params_b, seq, micro_batch,
grad_accum, gpus, gpu_type, gpu_mem_gb, framework, method, zero_stage, sharding, tp, pp, cp, ep, precision, act_ckpt, attn,
compile, offload, optimizer, mem_value, mem_unit, mem_kind, mem_scope, outcome, kind, notes, source. What is empty was not published.
A column that a file lacks is not published either; units, names of models, frameworks and GPUs are read in many spellings.
Every row that a plan stands for is predicted; the others are counted by reason. Rows that were measured as allocated, reserved
or device bytes are held against ours of that kind. DeepSpeed's own estimator answers for the same rows.
Nothing is fitted on the rows.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from dsplan.planner.memory import ledger
from dsplan.planner.memory.device import device_memory
from dsplan.planner.models.load import ModelSubject
from dsplan.planner.models.weightless import build_weightless
from dsplan.planner.tracing.flops import UNKNOWN, Flops
from dsplan.planner.tracing.tracer import trace
from dsplan.runtime.sharding.blocks import find_blocks
from dsplan.schemas.ledger import STEP_PHASES
from dsplan.schemas.problem import Problem
from dsplan.schemas.trace import Trace
from dsplan.schemas.units import GIB
from published.networks import Network, build
from published.runs import Run, Unmapped, run_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One row: what was measured, what we say, what DeepSpeed's estimator says (None: it does not know that stage)."""

    row_id: str
    framework: str
    gpu: str
    group: str
    kind: str
    measured_bytes: float | None
    predicted_bytes: int
    low_bytes: int
    high_bytes: int
    estimator_bytes: int | None
    verdict: str
    fits: bool | None
    where: str
    notes: tuple[str, ...]

    @property
    def error(self) -> float | None:
        return None if self.measured_bytes is None else self.predicted_bytes / self.measured_bytes - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of CSV files")
    parser.add_argument("--json", action="store_true", help="print every row and all scores as JSON")
    parser.add_argument("--only", default="", help="only rows whose row_id begins so")
    parser.add_argument(
        "--measured", action="store_true", help="only rows with a measured memory: no labels of fit alone"
    )
    parser.add_argument("--worst", type=int, default=10, help="how many of the worst rows to print")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    options = parser.parse_args()
    if not options.data.is_dir() or not list(options.data.glob("*.csv")):
        sys.exit(f"{options.data}: no folder with CSV files")
    torch.set_num_threads(1)
    rows = [row for path in sorted(options.data.glob("*.csv")) for row in read(path)]
    rows = [row for row in rows if row["row_id"].startswith(options.only)]
    if options.measured:
        rows = [row for row in rows if row.get("mem_value")]
    scores, reasons = score(rows, max(1, options.workers))
    report = summary(scores, reasons, len(rows))
    if options.json:
        json.dump(
            report | {"rows_scored": [asdict(each) | {"error": each.error} for each in scores]}, sys.stdout, indent=1
        )
        print()
    else:
        print(as_text(report, scores, options.worst))


def read(path: Path) -> list[dict[str, str]]:
    """Rows with what their cells say; one without a row_id is named by its file and its number."""
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        rows = [{key: (value or "").strip() for key, value in row.items() if key} for row in csv.DictReader(file)]
    return [row | {"row_id": row.get("row_id") or f"{path.stem}-row{place}"} for place, row in enumerate(rows, start=1)]


def score(rows: Sequence[Mapping[str, str]], workers: int = 1) -> tuple[list[Score], Counter[str]]:
    """Scores of the rows that have a plan, and how many have none, by reason. Rows of one model share its traces."""
    runs: list[Run] = []
    reasons: Counter[str] = Counter()
    for row in rows:
        try:
            runs.append(run_of(row))
        except Unmapped as reason:
            reasons[str(reason)] += 1
    by_network: dict[Network, list[Run]] = defaultdict(list)
    for run in runs:
        by_network[run.network].append(run)
    tasks = sorted((_traces_first(group) for group in by_network.values()), key=_cost, reverse=True)
    scores: list[Score] = []
    done, started = 0, time.monotonic()
    for found, refused in _results(tasks, workers):
        scores += found
        reasons.update(refused)
        done += len(found) + len(refused)
        took = time.monotonic() - started
        print(f"\r{done} of {len(runs)} rows, {took:.0f} s ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return sorted(scores, key=lambda each: each.row_id), reasons


def _results(tasks: Sequence[Sequence[Run]], workers: int) -> Iterator[tuple[list[Score], list[str]]]:
    """As they are done; the longest are begun first, so that none is left over for the end."""
    if workers == 1:
        yield from map(of_one_network, tasks)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(of_one_network, task) for task in tasks]):
            yield future.result()


def _traces_first(runs: Sequence[Run]) -> list[Run]:
    """The smallest and the largest sizes first: those between are derived from a few (planner/tracing/deriving.py)."""
    by_size = sorted(runs, key=lambda run: (run.plan.recompute, run.plan.seq_len or 0, run.plan.micro_batch))
    return [by_size[at // 2 if at % 2 == 0 else -1 - at // 2] for at in range(len(by_size))]


def _cost(runs: Sequence[Run]) -> int:
    """How many steps are traced: each takes about as long, whatever the model."""
    return len({(run.plan.recompute, run.plan.seq_len, run.plan.micro_batch) for run in runs})


def of_one_network(runs: Sequence[Run]) -> tuple[list[Score], list[str]]:
    """Scores of runs that share a model, and why the others have none."""
    torch.set_num_threads(1)
    subject: ModelSubject | None = None
    scores, refused = [], []
    for run in runs:
        try:
            subject = subject or subject_of(run.network)
            scores.append(predict(run, subject))
        except Problem as problem:
            refused.append(str(problem).rpartition(": ")[2])
        except Exception as error:  # a row never stops the others: it is counted, and named
            print(f"\n{run.row_id}: {type(error).__name__}: {error}", file=sys.stderr)
            refused.append(f"its model could not be built or traced: {type(error).__name__}")
    return scores, refused


def subject_of(network: Network) -> ModelSubject:
    module = build_weightless(lambda: build(network))
    module.train()

    def batch(micro_batch: int, seq_len: int | None) -> dict[str, torch.Tensor]:
        tokens = torch.zeros(micro_batch, seq_len or 1, dtype=torch.long)
        return {"input_ids": tokens, "labels": tokens.clone()}

    return ModelSubject(source="published", kind="file", module=module, sample_batch=batch)


def predict(run: Run, subject: ModelSubject) -> Score:
    plan = run.plan
    uncounted = Flops(units=(0.0,) * (1 + len(find_blocks(subject.module))), source=UNKNOWN)
    subject.flops.setdefault((plan.micro_batch, plan.seq_len), uncounted)  # bytes alone are asked for
    traced = trace(
        subject,
        precision=plan.precision,
        recompute=plan.recompute,
        micro_batch=plan.micro_batch,
        seq_len=plan.seq_len,
    )
    book = ledger(traced, plan)
    if plan.engine == "native":  # how our runtime loads a model says nothing of how theirs do
        book = replace(book, moments=tuple(moment for moment in book.moments if moment.phase in STEP_PHASES))
    memory, verdict = device_memory(book, plan, run.cluster, traced, expandable=run.expandable)
    assert memory.allocated_bytes is not None and memory.reserved_bytes is not None
    assert memory.device_bytes is not None and memory.device_bytes_low is not None
    assert memory.device_bytes_high is not None
    said = {"allocated": memory.allocated_bytes, "reserved": memory.reserved_bytes, "device": memory.device_bytes}
    return Score(
        row_id=run.row_id,
        framework=run.framework,
        gpu=run.gpu,
        group=run.group,
        kind=run.kind,
        measured_bytes=run.measured_bytes,
        predicted_bytes=said[run.kind],
        low_bytes=memory.device_bytes_low,
        high_bytes=memory.device_bytes_high,
        estimator_bytes=estimator(traced, run),
        verdict=verdict,
        fits=run.fits,
        where=book.peak.where,
        notes=run.notes,
    )


def estimator(traced: Trace, run: Run) -> int | None:
    """DeepSpeed's own estimate of one GPU's model states.

    Source: deepspeed/runtime/zero/stage_1_and_2.py, estimate_zero2_model_states_mem_needs, and stage3.py,
    estimate_zero3_model_states_mem_needs; the largest layer is the module with most parameters of its own.
    """
    plan, params = run.plan, traced.params
    ranks = plan.layout.ranks
    if plan.zero_stage == 2:
        return 2 * params if plan.offload != "none" else 2 * params + 18 * params // ranks
    if plan.zero_stage == 3:
        layer = 4 * max(param.numel for param in traced.all_params)
        per_rank = {"none": 18, "optimizer": 2, "param": 0}[plan.offload]
        return layer + per_rank * params // ranks
    return None


def summary(scores: Sequence[Score], reasons: Mapping[str, int], rows: int) -> dict[str, Any]:
    measured = [each for each in scores if each.error is not None]
    return {
        "version": 1,
        "rows": rows,
        "mapped": len(scores),
        "measured": len(measured),
        "unmapped": dict(sorted(reasons.items(), key=lambda item: -item[1])),
        "by_group": _table(measured, lambda each: each.group),
        "by_framework": _table(measured, lambda each: f"{each.group}: {each.framework}"),
        "by_gpu": _table(measured, lambda each: f"{each.group}: {each.gpu}"),
        "by_kind": _table(measured, lambda each: f"{each.group}: {each.kind}"),
        "fit": confusion(scores),
    }


def _table(scores: Iterable[Score], name: Callable[[Score], str]) -> dict[str, dict[str, float | int | None]]:
    groups: dict[str, list[Score]] = defaultdict(list)
    for each in scores:
        groups[name(each)].append(each)
    return {key: _figures(groups[key]) for key in sorted(groups)}


def _figures(scores: Sequence[Score]) -> dict[str, float | int | None]:
    """Median and 90th percentile of the relative error's size, and its mean with sign; the same of the estimator."""
    errors = [each.error for each in scores if each.error is not None]
    other = [
        each.estimator_bytes / each.measured_bytes - 1
        for each in scores
        if each.estimator_bytes is not None and each.measured_bytes
    ]
    return {
        "rows": len(errors),
        "median": percentile(errors, 0.5),
        "p90": percentile(errors, 0.9),
        "bias": statistics.fmean(errors) if errors else None,
        "estimator_rows": len(other),
        "estimator_median": percentile(other, 0.5),
        "estimator_p90": percentile(other, 0.9),
    }


def percentile(errors: Sequence[float], share: float) -> float | None:
    """Of the errors' sizes, interpolated between neighbours."""
    sizes = sorted(map(abs, errors))
    if not sizes:
        return None
    place = share * (len(sizes) - 1)
    low = int(place)
    high = min(low + 1, len(sizes) - 1)
    return sizes[low] + (place - low) * (sizes[high] - sizes[low])


def confusion(scores: Sequence[Score]) -> dict[str, dict[str, int]]:
    """{"fits" or "oom" in truth: {our verdict: rows}}, where both are known."""
    found: dict[str, dict[str, int]] = {}
    for truth, name in ((True, "fits"), (False, "oom")):
        found[name] = dict(Counter(each.verdict for each in scores if each.fits is truth and each.verdict != "unknown"))
    return found


def as_text(report: Mapping[str, Any], scores: Sequence[Score], worst: int) -> str:
    lines = [
        f"{report['rows']} rows, {report['mapped']} have a plan, {report['measured']} of them a measured memory",
        "",
    ]
    for title, key in (("by group", "by_group"), ("by framework", "by_framework"), ("by GPU", "by_gpu")):
        lines += [f"{title:62} rows  median     p90    bias   DeepSpeed's estimator: median, p90"]
        for name, figures in report[key].items():
            line = f"  {name[:60]:60} {figures['rows']:4}  {_percent(figures['median'])} {_percent(figures['p90'])}"
            line += f" {_percent(figures['bias'], sign=True)}"
            if figures["estimator_rows"]:
                line += f"   {_percent(figures['estimator_median'])} {_percent(figures['estimator_p90'])}"
            lines.append(line)
        lines.append("")
    lines.append("published -> verdict: " + json.dumps(report["fit"]))
    lines += ["", "rows without a plan, by reason:"]
    lines += [f"  {count:5}  {reason}" for reason, count in gathered(report["unmapped"]).items()]
    ranked = sorted((each for each in scores if each.error is not None), key=lambda each: -abs(each.error or 0))
    lines += ["", "worst rows:"] if worst else []
    for each in ranked[:worst]:
        assert each.measured_bytes is not None
        lines.append(
            f"  {_percent(each.error, sign=True)}  {each.row_id}: {each.kind} {each.measured_bytes / GIB:.2f} GiB, "
            f"predicted {each.predicted_bytes / GIB:.2f} ({each.group}; {each.where})"
        )
    return "\n".join(lines)


def gathered(reasons: Mapping[str, int]) -> dict[str, int]:
    """Reasons that begin alike ("way of training: adapter") as one, which lists how they end; the most frequent first."""
    kinds: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for reason, count in reasons.items():
        kind, _, case = reason.partition(": ")
        kinds[kind].append((case, count))
    found = {}
    for kind, cases in kinds.items():
        listed = ", ".join(f"{case} {count}" if len(cases) > 1 else case for case, count in sorted(cases, key=_usual))
        found[f"{kind}: {listed}" if listed else kind] = sum(count for _, count in cases)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _usual(case: tuple[str, int]) -> tuple[int, str]:
    return (-case[1], case[0])


def _percent(value: float | None, sign: bool = False) -> str:
    return "      -" if value is None else f"{value:{'+' if sign else ''}7.1%}"


if __name__ == "__main__":
    main()
