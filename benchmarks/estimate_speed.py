"""How long an estimate takes, part by part: `python benchmarks/estimate_speed.py [MODEL]` (Llama-3-8B unless told otherwise).

CPU seconds beside wall seconds, since only the former mean anything on a machine that others share. Importing torch and
transformers costs more than the traces, whose repeated blocks are traced few.
"""

import contextlib
import itertools
import resource
import sys
import time
from pathlib import Path

LLAMA = Path(__file__).parents[1] / "examples" / "llama3_8b" / "config.json"


def timed(title, action):
    wall, cpu = time.perf_counter(), time.process_time()
    result = action()
    print(f"{title:<28} {time.perf_counter() - wall:7.2f} s wall  {time.process_time() - cpu:7.2f} s cpu")
    return result


def imports():
    import dsplan.planner.tracing.tracer as tracer

    return tracer


def import_transformers():
    with contextlib.suppress(ImportError):
        from transformers import LlamaForCausalLM

        return LlamaForCausalLM


def main():
    model = sys.argv[1] if len(sys.argv) > 1 else str(LLAMA)
    timed("import torch", lambda: __import__("torch"))
    if model.endswith(".json"):
        timed("import transformers", import_transformers)
    tracer = timed("import dsplan", imports)
    from dsplan.planner.models.load import load_subject
    from dsplan.runtime.sharding.blocks import find_blocks

    subject = timed("load", lambda: load_subject(model))
    if subject.kind != "script":
        timed("FLOPs", lambda: tracer._flops(subject, find_blocks(subject.module), 1, subject.seq_len))
    for precision, recompute in itertools.product(("fp32", "fp16", "bf16"), ("none", "full")):
        timed(
            f"trace {precision}, recompute {recompute}",
            lambda name=precision, policy=recompute: tracer.trace(subject, precision=name, recompute=policy),
        )
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{'peak resident memory':<28} {peak_gib:7.2f} GiB")
    print(f"{'all':<28} {'':>14}  {time.process_time():7.2f} s cpu")


if __name__ == "__main__":
    main()
