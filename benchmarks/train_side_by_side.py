"""One training by dsplan, by DeepSpeed and by bare PyTorch: `python benchmarks/train_side_by_side.py [OPTIONS]`

Two gloo ranks train a GPT of 29 M parameters on 128 tokens each, with AdamW and clipping. For each ZeRO stage and precision
the three take turns step by step, so that other work on the machine disturbs all alike; printed are the medians, their
ratios, the median of the ratios round by round, and the ratio of processor time, which a busy machine disturbs least. Bare
PyTorch is DDP at stage 0 in fp32, `replicate` at stage 0 in bf16, and FSDP2 by blocks at stages 1 to 3, with a hand-written
loop. `--bytes` measures instead the peak of live bytes of rank 0 in the third step, each engine in a process of its own;
DeepSpeed gets small buckets (BUCKET=N elements in the environment). Without deepspeed it is left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from gpt import build_model, loss

RANKS, MICRO_BATCH, SEQ_LEN, VOCAB = 2, 2, 64, 8000
Step = Callable[[torch.Tensor], None]


BUCKET = int(os.environ.get("BUCKET", "2000000"))
"""Elements of DeepSpeed's buckets. Its default of 5e8 would be most of what it holds here."""


def config(zero_stage: int, precision: str, accumulation: int) -> dict[str, Any]:
    zero = {"stage": zero_stage, "reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET}
    if zero_stage == 3:
        zero |= {"stage3_prefetch_bucket_size": BUCKET, "stage3_param_persistence_threshold": 1000}
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "zero_optimization": zero if zero_stage else {"stage": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "bf16": {"enabled": precision == "bf16"},
        "steps_per_print": 1_000_000,
    }


def model(width: int) -> torch.nn.Module:
    torch.manual_seed(0)
    return build_model(8, width, 8, VOCAB, SEQ_LEN)


def engine_step(initialize: Callable[..., Any], width: int, zero_stage: int, precision: str, accumulation: int) -> Step:
    net = model(width)
    engine, *_ = initialize(
        model=net, model_parameters=net.parameters(), config=config(zero_stage, precision, accumulation)
    )

    def step(tokens: torch.Tensor) -> None:
        for _ in range(accumulation):
            engine.backward(loss(engine(tokens), (tokens,)))
            engine.step()

    return step


def dsplan_step(*wanted: Any) -> Step:
    from dsplan.runtime import initialize

    return engine_step(initialize, *wanted)


def deepspeed_step(*wanted: Any) -> Step:
    import deepspeed

    vars(sys.modules["deepspeed.comm.torch"])["build_shm_op"] = lambda: None  # would compile an operator for minutes
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    return engine_step(deepspeed.initialize, *wanted)


def bare_step(width: int, zero_stage: int, precision: str, accumulation: int) -> Step:
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    net = model(width)
    mesh = init_device_mesh("cpu", (RANKS,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if precision == "bf16" else None)
    run: Any = net
    if zero_stage == 0 and precision == "fp32":
        run = torch.nn.parallel.DistributedDataParallel(net)
    elif zero_stage == 0:
        for module in [*net.blocks, net]:
            replicate(module, mesh=mesh, mp_policy=policy)
    else:
        for block in net.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=zero_stage == 3)
        fully_shard(net, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)

    def step(tokens: torch.Tensor) -> None:
        for micro_batch in range(accumulation):
            last = micro_batch == accumulation - 1
            if zero_stage > 0 or precision != "fp32":
                if zero_stage < 2:
                    run.set_requires_gradient_sync(last)
                run.set_reshard_after_backward(last, recurse=zero_stage < 3)
            elif not last:
                run.require_backward_grad_sync = False
            (loss(run(tokens), (tokens,)) / accumulation).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


MAKERS = {"dsplan": dsplan_step, "DeepSpeed": deepspeed_step, "bare": bare_step}


def timed(rank: int, store: str, names: list[str], rounds: int, wanted: tuple[Any, ...]) -> None:
    start(rank, store)
    steps = {name: MAKERS[name](*wanted) for name in names}
    tokens = torch.randint(VOCAB, (MICRO_BATCH, SEQ_LEN))
    seconds: dict[str, list[float]] = {name: [] for name in names}
    processor: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 2):  # two to warm up
        for name in names if turn % 2 else names[::-1]:
            dist.barrier()
            began, used = time.perf_counter(), time.process_time()
            steps[name](tokens)
            dist.barrier()
            if turn >= 2:
                seconds[name].append(time.perf_counter() - began)
                processor[name].append(time.process_time() - used)
    if rank == 0:
        told = "  ".join(f"{name} {statistics.median(values):.3f} s" for name, values in seconds.items())
        for name in names[1:]:
            by_round = [own / other for own, other in zip(seconds["dsplan"], seconds[name], strict=True)]
            medians = statistics.median(seconds["dsplan"]) / statistics.median(seconds[name])
            used_up = statistics.median(processor["dsplan"]) / statistics.median(processor[name])
            told += f"  /{name} x{medians:.2f} (by round x{statistics.median(by_round):.2f}, processor x{used_up:.2f})"
        print(f"zero {wanted[1]} {wanted[2]} accumulation {wanted[3]}: {told}", flush=True)
    dist.destroy_process_group()


def peaked(rank: int, store: str, name: str, wanted: tuple[Any, ...], told: Any) -> None:
    from dsplan.runtime.measuring.storages import StorageTracker

    start(rank, store)
    peak = 0

    def grown() -> None:
        nonlocal peak
        peak = max(peak, tracker.total_bytes)

    with (tracker := StorageTracker(on_growth=grown)):
        step = MAKERS[name](*wanted)
        tokens = torch.randint(VOCAB, (MICRO_BATCH, SEQ_LEN))
        for _ in range(3):
            peak = tracker.total_bytes
            step(tokens)
    if rank == 0:
        told.put((peak, tracker.total_bytes))
    dist.destroy_process_group()


def start(rank: int, store: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stages", default="0,1,2,3")
    parser.add_argument("--precisions", default="fp32,bf16")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--bytes", action="store_true", help="peaks of live bytes instead of seconds")
    given = parser.parse_args()
    names = ["dsplan", *(["DeepSpeed"] if importlib.util.find_spec("deepspeed") else []), "bare"]
    for precision in given.precisions.split(","):
        for zero_stage in map(int, given.stages.split(",")):
            wanted = (given.width, zero_stage, precision, given.accumulation)
            with tempfile.TemporaryDirectory() as folder:
                if not given.bytes:
                    multiprocessing.spawn(timed, (f"{folder}/store", names, given.rounds, wanted), nprocs=RANKS)
                    continue
                peaks = {}
                for name in names:
                    queue = multiprocessing.get_context("spawn").SimpleQueue()
                    multiprocessing.spawn(peaked, (f"{folder}/{name}", name, wanted, queue), nprocs=RANKS)
                    peaks[name] = queue.get()
                told = "  ".join(
                    f"{name} {peak / 1e6:.1f} MB ({between / 1e6:.1f})" for name, (peak, between) in peaks.items()
                )
                told += "".join(f"  /{name} x{peaks['dsplan'][0] / peaks[name][0]:.2f}" for name in names[1:])
                print(f"zero {zero_stage} {precision}: peak (between steps): {told}", flush=True)


if __name__ == "__main__":
    main()
