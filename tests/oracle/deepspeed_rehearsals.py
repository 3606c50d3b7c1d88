"""Asks real DeepSpeed, run on fake tensors, how many bytes rank 0 holds: `python tests/oracle/deepspeed_rehearsals.py CELLS.json > OUT.json`

Needs deepspeed, torch and dsplan; one process for all cells. CELLS.json is a list of objects; every field has a default:
  {"model": "examples/gpt.py", "sets": {"layers": 4, ...}, "ranks": 2, "zero_stage": 3, "precision": "bf16", "micro_batch": 1, "accumulation": 1,
   "seq_len": 64, "recompute": "none", "offload": "none", "optimizer": {"name": "adamw", "kernel": "for-loop"}, "knobs": {"reduce_bucket_size": 200000},
   "config": {...what the user's own JSON says besides...}}
Written: the same list, each with `told`: bytes between steps (resident), at the peak of forward, backward and step of the third step, on the host,
by category at each of these peaks, and the collectives; or `problem`, where DeepSpeed refuses the cell.
`python tests/oracle/deepspeed_rehearsals.py --grid > CELLS.json` writes a grid of cells to begin with.
"""

import itertools
import json
import sys
import time
from functools import cache
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
SIZES = {"layers": 4, "width": 128, "heads": 4, "vocab": 1000, "positions": 64}


def grid() -> list[dict]:
    cells = []
    for stage, precision, ranks, accumulation in itertools.product(
        (0, 1, 2, 3), ("fp32", "fp16", "bf16"), (2, 8), (1, 2)
    ):
        knobs = {"reduce_bucket_size": 200_000, "allgather_bucket_size": 200_000}
        if stage == 3:
            knobs |= {"prefetch_bucket_size": 200_000, "param_persistence_threshold": 1000}
        cells.append(
            {"zero_stage": stage, "precision": precision, "ranks": ranks, "accumulation": accumulation, "knobs": knobs}
        )
    return cells


@cache
def subject(model: str, sets: tuple, seq_len: int | None):
    from dsplan.planner.models.load import load_subject

    path = model if Path(model).is_absolute() else str(ROOT / model)
    return load_subject(path, sets={name: str(value) for name, value in sets}, seq_len=seq_len)


def told(cell: dict) -> dict:
    from dsplan.planner.rehearsing.deepspeed_run import run
    from dsplan.schemas.choices import OptimizerSpec, ZeroKnobs
    from dsplan.schemas.layout import Layout
    from dsplan.schemas.plan import Plan

    model = cell.get("model", "examples/gpt.py")
    sets = cell.get("sets", SIZES if model == "examples/gpt.py" else {})
    plan = Plan(
        engine="deepspeed",
        layout=Layout(dp_shard=cell.get("ranks", 2)),
        zero_stage=cell.get("zero_stage", 3),
        precision=cell.get("precision", "bf16"),
        micro_batch=cell.get("micro_batch", 1),
        accumulation=cell.get("accumulation", 1),
        seq_len=cell.get("seq_len", 64),
        recompute=cell.get("recompute", "none"),
        offload=cell.get("offload", "none"),
        optimizer=OptimizerSpec(**cell.get("optimizer", {"name": "adamw", "kernel": "for-loop"})),
        knobs=ZeroKnobs(**cell.get("knobs", {})),
    )
    book = run(subject(model, tuple(sets.items()), plan.seq_len), plan, cell.get("config")).ledger
    return {
        "resident": book.resident_bytes,
        **{moment.phase: moment.allocated_bytes for moment in book.moments},
        "host": book.host_bytes,
        "live": {moment.phase: {item.category: item.bytes for item in moment.items} for moment in book.moments},
        "collectives": {sent.kind: [sent.count, sent.payload_bytes] for sent in book.collectives},
    }


def main() -> None:
    if sys.argv[1] == "--grid":
        print("[\n" + ",\n".join(json.dumps(cell) for cell in grid()) + "\n]")
        return
    records = []
    for cell in json.loads(Path(sys.argv[1]).read_text("utf-8")):
        begun = time.perf_counter()
        try:
            answer = {"told": told(cell)}
        except Exception as error:
            answer = {"problem": f"{type(error).__name__}: {error}"[:500]}
        records.append({**cell, **answer})
        print(f"{time.perf_counter() - begun:.1f} s {json.dumps(records[-1])[:300]}", file=sys.stderr, flush=True)
    rows = ",\n".join(f"    {json.dumps(record)}" for record in records)
    print(f'{{\n  "deepspeed": {json.dumps(version("deepspeed"))},\n  "records": [\n{rows}\n  ]\n}}')


if __name__ == "__main__":
    main()
