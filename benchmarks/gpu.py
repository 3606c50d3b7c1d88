"""Memory and speed of the engine on this machine's GPUs beside bare FSDP2: `python benchmarks/gpu.py [--dry-run]`

One rank for each GPU (NCCL). For ZeRO stages 0 to 3 in bf16 and fp16 it trains a GPT twice, by the engine and by FSDP2 with a
hand-written loop and the same flags, and prints medians of a step in milliseconds, peaks of allocated memory, and the last
loss of both. Checked: a step takes at most 1.05 times as long, the peak is at most 1.02 times as high, the losses agree to a
hundredth, and on several GPUs no stage holds more than the one before it. Exit code 1 where a check fails. It takes a few
minutes: under 8 on one H100 with the default size. `--dry-run` goes through the same steps on two gloo ranks, small, and
checks the losses alone.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from gpt import build_model, loss

SLOWER, HIGHER, LOSS_APART = 1.05, 1.02, 1e-2
STATIC_SCALE = 1024.0
"""Of fp16, so that both train the same from the first step."""
BUDGET_SECONDS = 8 * 60


@dataclass(frozen=True)
class Size:
    """Of the model and of what one rank is fed."""

    layers: int
    width: int
    vocab: int
    seq_len: int
    micro_batch: int
    rounds: int


FULL = Size(layers=24, width=1024, vocab=50304, seq_len=1024, micro_batch=4, rounds=10)
SMALL = Size(layers=2, width=32, vocab=100, seq_len=16, micro_batch=2, rounds=2)
Step = Callable[[torch.Tensor], torch.Tensor]


def model(size: Size) -> torch.nn.Module:
    torch.manual_seed(0)
    return build_model(size.layers, size.width, max(1, size.width // 64), size.vocab, size.seq_len)


def engine_step(size: Size, zero_stage: int, precision: str) -> Step:
    from dsplan.runtime import initialize

    block = {"enabled": True} | ({"loss_scale": STATIC_SCALE} if precision == "fp16" else {})
    engine, *_ = initialize(
        model=model(size),
        config={
            "train_micro_batch_size_per_gpu": size.micro_batch,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": zero_stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
            precision: block,
        },
    )

    def step(tokens: torch.Tensor) -> torch.Tensor:
        value = loss(engine(tokens), (tokens,))
        engine.backward(value)
        engine.step()
        return value.detach()

    return step


def bare_step(size: Size, zero_stage: int, precision: str) -> Step:
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    net: Any = model(size).to(device())
    with torch.no_grad():
        for parameter in net.parameters():  # masters begin with the values that are computed with
            parameter.copy_(parameter.to(dtype))
    mesh, policy = init_device_mesh(device().type, (dist.get_world_size(),)), MixedPrecisionPolicy(param_dtype=dtype)
    for module in [*net.blocks, net]:
        if zero_stage == 0:
            replicate(module, mesh=mesh, mp_policy=policy)
        else:
            reshard = zero_stage == 3 and module is not net
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    scale = STATIC_SCALE if precision == "fp16" else 1.0

    def step(tokens: torch.Tensor) -> torch.Tensor:
        value = loss(net(tokens), (tokens,))
        (value.float() * scale).backward()
        if scale != 1.0:
            torch._foreach_div_([parameter.grad.to_local() for parameter in net.parameters()], scale)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    return step


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@dataclass(frozen=True)
class Measured:
    """Of one way to train: the peak of allocated memory of a step, and the loss of the last one."""

    peak_bytes: int
    last_loss: float


def peak_of(make: Callable[[], Step], tokens: torch.Tensor, rounds: int) -> Measured:
    """By itself on the device, so that no other model lies beside it."""
    step = make()
    value = step(tokens)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    for _ in range(rounds):
        value = step(tokens)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return Measured(peak, value.item())


def seconds_of(steps: dict[str, Step], tokens: torch.Tensor, rounds: int) -> dict[str, float]:
    """Medians. They take turns, so that whatever else runs disturbs all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 2):  # two to warm up
        for name in steps if turn % 2 else reversed(steps):
            dist.barrier()
            synchronize()
            began = time.perf_counter()
            steps[name](tokens)
            synchronize()
            if turn >= 2:
                seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in seconds.items()}


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def run_rank(rank: int, world: int, store: str, size: Size, dry: bool, failed: Any) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    if not dry:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("gloo" if dry else "nccl", init_method=f"file://{store}", rank=rank, world_size=world)
    torch.manual_seed(rank)
    tokens = torch.randint(size.vocab, (size.micro_batch, size.seq_len), device=device())
    makers = {"engine": engine_step, "FSDP2": bare_step}
    began, before, misses = time.monotonic(), {}, []
    for precision in ("bf16", "fp16"):
        for zero_stage in (0, 1, 2, 3):
            wanted = (size, zero_stage, precision)
            told = {
                name: peak_of(lambda make=make: make(*wanted), tokens, size.rounds)  # noqa: B023
                for name, make in makers.items()
            }
            seconds = seconds_of({name: make(*wanted) for name, make in makers.items()}, tokens, size.rounds)
            own, bare = told["engine"], told["FSDP2"]
            where = f"zero {zero_stage} {precision}"
            if abs(own.last_loss - bare.last_loss) > LOSS_APART * abs(bare.last_loss):
                misses.append(f"{where}: the losses are {own.last_loss:.4f} and {bare.last_loss:.4f}")
            if not dry:
                if seconds["engine"] > SLOWER * seconds["FSDP2"]:
                    misses.append(f"{where}: a step takes x{seconds['engine'] / seconds['FSDP2']:.2f}")
                if own.peak_bytes > HIGHER * bare.peak_bytes:
                    misses.append(f"{where}: the peak is x{own.peak_bytes / bare.peak_bytes:.2f}")
                if world > 1 and own.peak_bytes > HIGHER * before.get(precision, own.peak_bytes):
                    misses.append(f"{where}: the peak is higher than at stage {zero_stage - 1}")
            before[precision] = own.peak_bytes
            if rank == 0:
                rows = (
                    f"{name} {seconds[name] * 1e3:.1f} ms, peak {told[name].peak_bytes / 1e9:.2f} GB, loss {told[name].last_loss:.4f}"
                    for name in makers
                )
                print(f"{where}: {'; '.join(rows)}", flush=True)
    if rank == 0:
        took = time.monotonic() - began
        if took > BUDGET_SECONDS:
            misses.append(f"it took {took:.0f} s, more than {BUDGET_SECONDS}")
        print(f"{world} rank(s), {took:.0f} s; " + ("; ".join(misses) if misses else "every check passed"), flush=True)
        failed.put(bool(misses))
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dry-run", action="store_true", help="two small gloo ranks instead of GPUs")
    parser.add_argument("--layers", type=int, default=FULL.layers)
    given = parser.parse_args()
    if not given.dry_run and not torch.cuda.is_available():
        print("benchmarks/gpu.py needs a CUDA device, and torch sees none here; --dry-run tries its logic on CPUs")
        return 2
    size = SMALL if given.dry_run else Size(**{**vars(FULL), "layers": given.layers})
    world = 2 if given.dry_run else torch.cuda.device_count()
    failed = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        multiprocessing.spawn(run_rank, (world, store, size, given.dry_run, failed), nprocs=world)
    return int(failed.get())


if __name__ == "__main__":
    raise SystemExit(main())
