"""Microseconds of one candidate: ledger and step time of a 32-block model, per engine and ZeRO stage.

python benchmarks/formula_speed.py
"""

from __future__ import annotations

import time
from pathlib import Path

from dsplan.planner.memory import ledger
from dsplan.planner.memory.device import device_memory
from dsplan.planner.models.load import load_subject
from dsplan.planner.timing import step_time
from dsplan.planner.tracing.tracer import trace
from dsplan.schemas.cluster import parse_cluster
from dsplan.schemas.layout import Layout
from dsplan.schemas.plan import ENGINES, Plan

MODEL = Path(__file__).parents[1] / "examples" / "gpt.py"
REPEATS = 200


def main() -> None:
    sets = {"layers": "32", "width": "1024", "heads": "16"}
    subject = load_subject(str(MODEL), sets=sets)
    traced = trace(subject, precision="bf16", micro_batch=1, seq_len=1024)
    cluster = parse_cluster("8xH100-80GB")
    print(f"{len(traced.segments)} segments, {len(traced.blocks)} blocks; microseconds a candidate (best of 5)")
    for engine in ENGINES:
        for zero_stage in range(4):
            for accumulation in (1, 8):
                layout = Layout(dp_shard=8)
                plan = Plan(
                    engine=engine,
                    layout=layout,
                    zero_stage=zero_stage,
                    precision="bf16",
                    micro_batch=1,
                    accumulation=accumulation,
                )
                best = min(_seconds(lambda plan=plan: _candidate(traced, plan, cluster)) for _ in range(5))
                name = f"{engine} zero {zero_stage} accumulation {accumulation}"
                print(f"{name:36} {best / REPEATS * 1e6:8.0f}")


def _candidate(traced, plan, cluster):
    device_memory(ledger(traced, plan), plan, cluster, traced)
    step_time(traced, plan, cluster)


def _seconds(work) -> float:
    start = time.process_time()
    for _ in range(REPEATS):
        work()
    return time.process_time() - start


if __name__ == "__main__":
    main()
