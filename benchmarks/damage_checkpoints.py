"""Damage checkpoints in many ways, and try to load each: python benchmarks/damage_checkpoints.py [--count 200] [--seed 0]

Two ranks save three checkpoints of a small net. Each damage is done to a copy: a file cut short, a bit flipped, a file missing,
empty, swapped for that of another step, or one too many. Loading must refuse it by the name of the file, and offer the newest
other checkpoint that is whole. Prints what was refused how often, and every one that was not.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from dsplan.runtime import initialize
from dsplan.schemas.problem import Problem
from torch import nn

STEPS = (2, 4, 6)
CONFIG = {
    "train_batch_size": 4,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
}


@dataclass(frozen=True)
class Damage:
    """kind: what was done; file: what a refusal must name."""

    kind: str
    file: str


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))


def save_all(rank: int, world_size: int, folder: str) -> None:
    """What each of the ranks that write runs."""
    dist.init_process_group("gloo", init_method=f"file://{folder}.store", rank=rank, world_size=world_size)
    save_steps(folder)
    dist.destroy_process_group()


def save_steps(folder: str) -> None:
    engine, *_ = initialize(model=build(), config=CONFIG)
    generator = torch.Generator().manual_seed(dist.get_rank())
    while engine.global_steps < STEPS[-1]:
        x = torch.randn(4 // dist.get_world_size(), 8, generator=generator)
        engine.backward(engine(x).square().mean())
        engine.step()
        if engine.global_steps in STEPS:
            engine.save_checkpoint(folder, client_state={"epoch": engine.global_steps})


def damage(folder: Path, chance: random.Random) -> Damage:
    """Do one thing to the newest checkpoint under the folder, or to `latest`."""
    newest, other = (folder / f"global_step{STEPS[-1 - back]}" for back in (0, chance.choice((1, 2))))
    files = sorted(path.name for path in newest.iterdir())
    kind = chance.choice(sorted(KINDS))
    if kind in ("mixed", "two mixed", "surplus"):
        return KINDS[kind](newest, other, files, chance)
    if chance.random() < 0.15:
        return KINDS[kind](folder, other, ["latest"], chance)
    return KINDS[kind](newest, other, files, chance)


def _cut(place: Path, _: Path, files: list[str], chance: random.Random) -> Damage:
    path = place / chance.choice(files)
    data = path.read_bytes()
    # `latest` cut to global_step4 would be another checkpoint's name; it is cut to no name.
    path.write_bytes(data[: chance.randrange(min(len(data), 11) if path.name == "latest" else len(data))])
    return Damage("cut", path.name)


def _flip(place: Path, _: Path, files: list[str], chance: random.Random) -> Damage:
    path = place / chance.choice(files)
    data = bytearray(path.read_bytes())
    # One bit may turn global_step6 into global_step4, which is whole, or a newline at the end, which is no damage.
    position = chance.randrange(11 if path.name == "latest" else len(data))
    data[position] ^= 1 << chance.randrange(8)
    path.write_bytes(data)
    return Damage("bit flipped", path.name)


def _remove(place: Path, _: Path, files: list[str], chance: random.Random) -> Damage:
    path = place / chance.choice(files)
    path.unlink()
    return Damage("missing", path.name)


def _empty(place: Path, _: Path, files: list[str], chance: random.Random) -> Damage:
    path = place / chance.choice(files)
    path.write_bytes(b"")
    return Damage("empty", path.name)


def _mix(place: Path, other: Path, files: list[str], chance: random.Random) -> Damage:
    name = chance.choice(files)
    shutil.copyfile(other / name, place / name)
    return Damage("of another step", name)


def _mix_two(place: Path, other: Path, files: list[str], chance: random.Random) -> Damage:
    """The manifest and all but one file: then the one that is of this step is the stranger, or the manifest is."""
    kept = chance.choice([name for name in files if name != "manifest.json"])
    for name in files:
        if name != kept:
            shutil.copyfile(other / name, place / name)
    return Damage("all but one of another step", "manifest.json")


def _add(place: Path, other: Path, files: list[str], chance: random.Random) -> Damage:
    name = "shard-00003-model-00001-of-00001.safetensors"
    shutil.copyfile(other / chance.choice([name for name in files if name.endswith(".safetensors")]), place / name)
    return Damage("one too many", name)


KINDS: dict[str, Callable[[Path, Path, list[str], random.Random], Damage]] = {
    "cut": _cut,
    "bit flipped": _flip,
    "missing": _remove,
    "empty": _empty,
    "mixed": _mix,
    "two mixed": _mix_two,
    "surplus": _add,
}


def try_all(source: Path, scratch: Path, count: int, seed: int) -> tuple[collections.Counter[str], list[str]]:
    """How often each kind was refused as it must be, and a line for each damage that was not."""
    engine, *_ = initialize(model=build(), config=CONFIG)
    before = {name: parameter.detach().clone() for name, parameter in engine.masters().items()}
    refused: collections.Counter[str] = collections.Counter()
    wrong: list[str] = []
    chance = random.Random(seed)
    for index in range(count):
        folder = scratch / str(index)
        shutil.copytree(source, folder)
        done = damage(folder, chance)
        # Where `latest` is the damaged one, the newest is as good as ever.
        offered = folder / f"global_step{STEPS[-1] if done.file == 'latest' else STEPS[-2]}"
        try:
            engine.load_checkpoint(folder)
            text = "it was loaded"
        except Problem as problem:
            text = str(problem)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        changed = [
            name
            for name, value in engine.masters().items()
            if not torch.equal(value.full_tensor(), before[name].full_tensor())
        ]
        call = f'load_checkpoint("{folder}", tag="{offered.name}")'
        if f"/{done.file}: " in text and call in text and "\n" not in text and not changed and engine.global_steps == 0:
            refused[done.kind] += 1
        else:
            wrong.append(f"damage {index}, {done.file} {done.kind}: {text}{'; parameters changed' if changed else ''}")
        shutil.rmtree(folder)
    path, _ = engine.load_checkpoint(source)
    assert path == str(source / f"global_step{STEPS[-1]}")
    return refused, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "source"
        torch.multiprocessing.spawn(save_all, (2, str(source)), nprocs=2)
        refused, wrong = try_all(source, Path(scratch), options.count, options.seed)
    for kind, times in sorted(refused.items()):
        print(f"{times:4} {kind}: refused by name, the newest other one offered")
    for line in wrong:
        print(line)
    print(f"{refused.total()} of {options.count} damaged checkpoints refused")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
