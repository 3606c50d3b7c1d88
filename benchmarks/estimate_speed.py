"""How long an estimate takes, part by part: `python benchmarks/estimate_speed.py [MODEL]` (Llama-3-8B unless told otherwise).

CPU seconds beside wall seconds, since only the former mean anything on a machine that others share.
"""

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


def main():
    model = sys.argv[1] if len(sys.argv) > 1 else str(LLAMA)
    tracer = timed("imports", imports)
    from dsplan.planner.models.load import load_subject
    from dsplan.runtime.blocks import find_blocks

    subject = timed("load", lambda: load_subject(model))
    if subject.kind != "script":
        timed("FLOPs", lambda: tracer._flops(subject, find_blocks(subject.module), 1, subject.seq_len))
    for recompute in ("none", "full"):
        timed(
            f"trace, recompute {recompute}",
            lambda policy=recompute: tracer.trace(subject, precision="bf16", recompute=policy),
        )
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{'peak resident memory':<28} {peak_gib:7.2f} GiB")
    print(f"{'all':<28} {'':>14}  {time.process_time():7.2f} s cpu")


if __name__ == "__main__":
    main()
