"""What the meter costs: `python benchmarks/meter_overhead.py [WIDTH ...]`, two gloo ranks, fp32, stage 3, 50 steps.

Engines without a meter, with one that watches nothing (off), and with one that watches its first two steps as under a
launch (on) take turns step by step, so that other work on the machine disturbs all alike. Prints the sums over 50 steps
and their ratios, in time and in rank 0's processor time, which other work hardly changes; for `off` also that of medians,
since its steps do the same work.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from dsplan.runtime import initialize

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from gpt import build_model, loss

STEPS = 50
WIDTHS = (224, 672)
"""2.9 M and 23.1 M parameters."""
MODES = {"no meter": None, "meter off": [], "meter on": [2, 3]}
"""dsplan.meter_steps; the first step makes the states, and is not timed."""


def run_rank(rank: int, store: str, width: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    engines = {}
    for name, steps in MODES.items():
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 3},
            "optimizer": {"type": "AdamW"},
            "dsplan": {} if steps is None else {"meter_steps": steps},
        }
        engines[name], *_ = initialize(model=build_model(4, width, 4, 2000, 128), config=config)
    tokens = torch.randint(2000, (2, 128))
    taken: dict[str, list[float]] = {name: [] for name in MODES}
    worked = dict.fromkeys(MODES, 0.0)
    for number in range(STEPS + 1):
        for name, engine in engines.items():
            dist.barrier()
            start, began = time.perf_counter(), time.process_time()
            engine.backward(loss(engine(tokens), (tokens,)))
            engine.step()
            if number:
                taken[name].append(time.perf_counter() - start)
                worked[name] += time.process_time() - began
    if rank == 0:
        count = sum(parameter.numel() for parameter in engines["no meter"].module.parameters())
        base = taken["no meter"]
        print(f"{count / 1e6:.1f} M parameters, {STEPS} steps")
        for name, seconds in taken.items():
            ratio, middle = sum(seconds) / sum(base), statistics.median(seconds) / statistics.median(base)
            busy = worked[name] / worked["no meter"]
            print(
                f"  {name:10} {sum(seconds):8.3f} s  x{ratio:.3f}  median step x{middle:.3f}  "
                f"processor {worked[name]:8.3f} s  x{busy:.3f}"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    for width in map(int, sys.argv[1:] or WIDTHS):
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.spawn(run_rank, (f"{folder}/store", width), nprocs=2)
