"""How long a rehearsal takes: `python benchmarks/rehearsal_speed.py [MODEL] [--engine native|deepspeed] [--ranks 64] [--zero 3] [--size 8B|70B] [--seq-len 4096]`

MODEL: a HF config.json (default: examples/llama3_8b). Prints seconds on the clock and of the processor, of importing, loading and rehearsing apart,
and the largest resident set. Engine deepspeed needs DeepSpeed here.
"""

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LLAMA_70B = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80}
"""Source: https://huggingface.co/meta-llama/Meta-Llama-3-70B/blob/main/config.json."""


def timed(name: str, act: Callable[[], Any]) -> Any:
    clock, processor = time.perf_counter(), time.process_time()
    result = act()
    print(
        f"{name:12} {time.perf_counter() - clock:7.1f} s   {time.process_time() - processor:7.1f} s of the processor",
        flush=True,
    )
    return result


def importing(engine: str) -> None:
    import torch._dynamo  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    if engine == "deepspeed":
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed  # noqa: F401


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default=str(ROOT / "examples/llama3_8b/config.json"))
    parser.add_argument("--engine", default="native", choices=["native", "deepspeed"])
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--zero", type=int, default=3)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--recompute", default="none")
    parser.add_argument(
        "--size", choices=["8B", "70B"], default="8B", help="70B: the model's config with Llama-3-70B's sizes"
    )
    options = parser.parse_args()
    config = json.loads(Path(options.model).read_text("utf-8")) | (LLAMA_70B if options.size == "70B" else {})
    timed("importing", lambda: importing(options.engine))

    from dsplan.planner.models.load import load_subject
    from dsplan.schemas.layout import Layout
    from dsplan.schemas.plan import Plan

    plan = Plan(
        engine=options.engine,
        layout=Layout(dp_shard=options.ranks),
        zero_stage=options.zero,
        precision="bf16",
        micro_batch=1,
        accumulation=1,
        seq_len=options.seq_len,
        recompute=options.recompute,
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(config), "utf-8")
        subject: Any = timed("loading", lambda: load_subject(str(file), seq_len=options.seq_len))
        if options.engine == "native":
            from dsplan.planner.rehearsing.native import rehearsal as run
        else:
            from dsplan.planner.rehearsing.deepspeed_run import run
        told = timed("rehearsing", lambda: run(subject, plan))
    print(f"{told.ledger.allocated_bytes:,} bytes allocated at the peak, {told.ledger.resident_bytes:,} between steps")
    print(
        f"{len(told.events):,} events; {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB of this process"
    )


if __name__ == "__main__":
    sys.exit(main())
