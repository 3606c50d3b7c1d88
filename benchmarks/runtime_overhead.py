"""What the engine costs beside bare FSDP2: `python benchmarks/runtime_overhead.py [WIDTH]`, two gloo ranks, fp32, stage 3.

Prints the best of several steps, in seconds, of: FSDP2 with a hand-written loop that clips; the engine; the engine while
the meter watches. They take turns step by step, so that other work on the machine disturbs all alike.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from dsplan.runtime import initialize
from dsplan.runtime.measuring.meter import Meter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from gpt import build_model, loss

ROUNDS = 12
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW"},
}


def bare_step(width: int) -> Callable[[torch.Tensor], None]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = build_model(4, width, 4, 2000, 128)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(tokens: torch.Tensor) -> None:
        loss(model(tokens), (tokens,)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def engine_step(width: int, metered: bool) -> Callable[[torch.Tensor], None]:
    engine, _, _, _ = initialize(model=build_model(4, width, 4, 2000, 128), config=CONFIG)

    def step(tokens: torch.Tensor) -> None:
        if metered:
            engine.observers = [Meter(engine)]
        engine.backward(loss(engine(tokens), (tokens,)))
        engine.step()
        if metered:  # a new meter watches its first steps
            engine.global_steps = 0

    return step


def run_rank(rank: int, store: str, width: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    steps = {
        "bare FSDP2": bare_step(width),
        "the engine": engine_step(width, metered=False),
        "the engine, watched": engine_step(width, metered=True),
    }
    tokens = torch.randint(2000, (2, 128))
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(ROUNDS):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step(tokens)
            best[name] = min(best[name], time.perf_counter() - start)
    if rank == 0:
        for name, seconds in best.items():
            print(f"{name:20} {seconds:.4f} s  x{seconds / best['bare FSDP2']:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        width = int(sys.argv[1]) if len(sys.argv) > 1 else 256
        multiprocessing.spawn(run_rank, (f"{folder}/store", width), nprocs=2)
