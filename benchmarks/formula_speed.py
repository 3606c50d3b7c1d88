"""Microseconds of one formula candidate: its ledger, what that takes on the device, the verdict and the step time.

python benchmarks/formula_speed.py [--models gpt-32,llama-70b,llama-405b] [--candidates 3000]

Candidates are drawn from ZeRO stages x precisions x micro-batches x tp x pp x dp x accumulation, per engine. "first" is each
candidate's first time, with nothing remembered but the traces; "again" the same once more, as a search that comes back.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

from dsplan.planner.memory import ledger
from dsplan.planner.memory.device import device_memory
from dsplan.planner.models.load import Subject, load_subject
from dsplan.planner.timing import step_time
from dsplan.planner.tracing.tracer import trace
from dsplan.schemas.cluster import parse_cluster
from dsplan.schemas.layout import Layout
from dsplan.schemas.plan import ENGINES, Plan

EXAMPLE = Path(__file__).parents[1] / "examples" / "gpt.py"
LLAMAS = {
    "llama-8b": (32, 4096, 14336, 32),
    "llama-70b": (80, 8192, 28672, 64),
    "llama-405b": (126, 16384, 53248, 128),
}
"""Blocks, width, inner width, heads. Source: Grattafiori et al. 2024 (arXiv:2407.21783), table 3."""
PRECISIONS, MICRO_BATCHES, SEQ_LEN = ("fp32", "fp16", "bf16"), (1, 2), 4096


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="gpt-32,llama-70b,llama-405b")
    parser.add_argument("--candidates", type=int, default=3000)
    asked = parser.parse_args()
    cluster = parse_cluster("64x8xH100-80GB")
    for name in asked.models.split(","):
        subject, seq_len = _subject(name)
        start = time.perf_counter()
        traces = {
            (precision, micro_batch): trace(
                subject, precision=precision, recompute="full", micro_batch=micro_batch, seq_len=seq_len
            )
            for precision, micro_batch in itertools.product(PRECISIONS, MICRO_BATCHES)
        }
        blocks = len(next(iter(traces.values())).blocks)
        print(f"{name}: {blocks} blocks, {len(traces)} traces in {time.perf_counter() - start:.1f} s")
        for engine in ENGINES:
            plans = _plans(engine, seq_len, asked.candidates)
            for when in ("first", "again"):
                took = [_seconds(traces[plan.precision, plan.micro_batch], plan, cluster) for plan in plans]
                median, total = statistics.median(took), sum(took)
                print(
                    f"  {engine:10} {when}: median {median * 1e6:6.0f} us, mean {total / len(took) * 1e6:6.0f} us, "
                    f"100,000 in {total / len(took) * 1e5:4.0f} s"
                )


def _plans(engine, seq_len: int, number: int) -> list[Plan]:
    degrees, accumulations = (1, 2, 4, 8), (1, 2, 4, 8, 16, 64)
    every = [
        Plan(
            engine=engine,
            layout=Layout(dp_shard=dp, tp=tp, pp=pp),
            zero_stage=zero_stage,
            precision=precision,
            micro_batch=micro_batch,
            accumulation=accumulation,
            seq_len=seq_len,
            recompute="full",
        )
        for zero_stage, precision, micro_batch, tp, pp, dp, accumulation in itertools.product(
            range(4), PRECISIONS, MICRO_BATCHES, degrees, degrees, (1, 8, 16, 64), accumulations
        )
        if pp == 1 or zero_stage < 2
    ]
    return random.Random(0).sample(every, min(number, len(every)))


def _seconds(traced, plan: Plan, cluster) -> float:
    start = time.process_time()
    device_memory(ledger(traced, plan), plan, cluster, traced)
    step_time(traced, plan, cluster)
    return time.process_time() - start


def _subject(name: str) -> tuple[Subject, int]:
    if name == "gpt-32":
        return load_subject(str(EXAMPLE), sets={"layers": "32", "width": "1024", "heads": "16"}), 1024
    blocks, width, inner, heads = LLAMAS[name]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": blocks,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "use_cache": False,
    }
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(config))
    return load_subject(str(folder / "config.json"), seq_len=SEQ_LEN), SEQ_LEN


if __name__ == "__main__":
    main()
