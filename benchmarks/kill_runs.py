"""What SIGKILL leaves behind: `python benchmarks/kill_runs.py [--kills 60] [--seed 0]`.

Trains a small model on two gloo ranks under `dsplan launch --max-restarts`, saving a checkpoint after every step, and kills
a random rank or the launcher: at a random moment, or as soon as a save begins. A killed launch is started again. Then it
holds, for every run, that it ends well with the losses of a run that nobody disturbed, bit for bit; that each start resumed
from the newest complete checkpoint or a newer one; that no complete checkpoint was lost or damaged; that no process, no
temporary folder and no half a checkpoint is left. Prints one line per kill; exit code 1 and the reason where one fails.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

LIMIT_SECONDS = 300
"""For whatever is waited for; a machine under load takes a minute to start three processes that import torch."""
STEPS_BETWEEN = 6
"""At most so many steps between a start and a kill."""
MARK = "DSPLAN_KILL_RUN"
"""In the environment of a run's processes, so that those left are found, whatever their parents."""
COMMAND = "from dsplan.planner.cli import main; main()"
CONFIG = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    "zero_optimization": {"stage": 2},
}


class Fault(Exception):
    """What a kill broke."""


# --- the run: a script under dsplan launch ---


def train(folder: Path, steps: int, *, save: bool = True) -> list[str]:
    """Train up to so many steps, from the newest checkpoint on; the losses of this rank, as exact words."""
    import torch
    from dsplan.runtime import initialize

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    engine, _, _, _ = initialize(model=model, config=CONFIG)
    if save:
        engine.load_checkpoint(folder / "checkpoints")
    rank, losses = engine.global_rank, []
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if save:
        (folder / f"started_{start}_{rank}.json").write_text(json.dumps([os.getpid(), engine.global_steps]))
    while engine.global_steps < steps:
        for _ in range(engine.gradient_accumulation_steps()):
            data = torch.Generator().manual_seed(engine.micro_steps * 1000 + rank)
            loss = engine(torch.randn(2, 64, generator=data)).pow(2).mean()
            engine.backward(loss)
            engine.step()
        losses.append(f"{engine.global_steps} {loss.item().hex()}")
        if save:
            with (folder / f"losses_{rank}.txt").open("a") as out:
                out.write(losses[-1] + "\n")
            engine.save_checkpoint(folder / "checkpoints")
    return losses


# --- the killer ---


@dataclass
class Run:
    """One folder, trained to the end through any number of kills."""

    folder: Path
    ranks: int
    steps: int
    restarts: int
    background: bool = False
    """Checkpoints are written while training goes on."""
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    launcher: subprocess.Popen[bytes] | None = None
    start: int = 0
    seen: set[str] = field(default_factory=set)
    """The complete checkpoints that there were at a kill."""

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def temporary(self) -> Path:
        return self.folder / "tmp"

    def launch(self) -> None:
        """Start, or start again after the launcher was killed."""
        for path in self.folder.glob("started_*"):
            path.unlink()
        self.start = 0
        self.temporary.mkdir(exist_ok=True)
        config = str(self.folder / "ds_config.json")
        Path(config).write_text(json.dumps({**CONFIG, "dsplan": {"checkpoint": {"async": self.background}}}))
        options = ["--ranks", str(self.ranks), "--max-restarts", str(self.restarts), "--timeout", "120"]
        script = [str(Path(__file__)), "--train", str(self.folder), "--steps", str(self.steps)]
        with (self.folder / "log.txt").open("ab") as log:
            self.launcher = subprocess.Popen(
                [sys.executable, "-c", COMMAND, "launch", *options, "-o", str(self.folder), config, *script],
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, MARK: self.mark, "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1"},
            )

    def started(self) -> list[tuple[int, int]] | None:
        """(pid, step it resumed from) by rank, once all ranks of this start are in their loop."""
        found = []
        for rank in range(self.ranks):
            try:
                found.append(tuple(json.loads((self.folder / f"started_{self.start}_{rank}.json").read_text())))
            except (OSError, ValueError):
                return None
        return found  # type: ignore[return-value]

    def steps_made(self) -> int:
        """By rank 0; kept by its checkpoints or not."""
        try:
            lines = (self.folder / "losses_0.txt").read_text().splitlines()
        except OSError:
            return 0
        return int(lines[-1].split()[0]) if lines else 0

    def processes(self) -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if _is_marked(process, self.mark)]

    def end(self) -> None:
        """Leave nothing, whatever happened."""
        for process in self.processes():
            process.kill()


def _is_marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark
    except (psutil.Error, OSError):
        return False


def wait_for(what: str, condition: Callable[[], Any], seconds: float = LIMIT_SECONDS) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.005)
    raise Fault(f"{what}: not within {seconds:g} s")


def kill_once(run: Run, dice: random.Random) -> str | None:
    """Wait for the ranks to train, and kill; what was killed and when, None where the run had ended before."""
    newest = _newest(run)
    assert run.launcher is not None
    launcher = run.launcher
    wait_for("start", lambda: run.started() or launcher.poll() is not None)
    ranks = run.started()
    if ranks is None:
        raise Fault(f"the launcher ended with {launcher.poll()} before its ranks trained")
    resumed = {step for _, step in ranks}
    if len(resumed) > 1 or min(resumed) < newest:
        raise Fault(f"ranks resumed from steps {sorted(resumed)}, but checkpoint {newest} was complete")
    after = min(resumed) + dice.randrange(STEPS_BETWEEN)
    wait_for("a step", lambda: run.steps_made() >= after or launcher.poll() is not None)
    if dice.random() < 0.5:
        moment, delay = "while saving", dice.uniform(0, 0.02)
        wait_for("a save", lambda: list(run.checkpoints.glob(".partial_*")) or launcher.poll() is not None)
    else:
        moment, delay = "at any moment", dice.uniform(0, 0.3)
    time.sleep(delay)
    victim = dice.randrange(run.ranks + 1)
    pid = launcher.pid if victim == run.ranks else ranks[victim][0]
    run.seen |= _complete(run)
    done = _done(run)
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return None
    if done:
        return None
    if victim == run.ranks:
        launcher.wait()
        wait_for("the end of all processes", lambda: not run.processes(), 30)
        wait_for("the end of the temporary folders", lambda: not list(run.temporary.glob("dsplan_*")), 30)
        run.launch()
    else:
        run.start += 1
    return f"{'the launcher' if victim == run.ranks else f'rank {victim}'} {moment}, resumed from step {min(resumed)}"


def _done(run: Run) -> bool:
    return f"global_step{run.steps}" in run.seen


def _complete(run: Run) -> set[str]:
    from dsplan.runtime.checkpoints.manifest import complete_tags

    return set(complete_tags(run.checkpoints)) if run.checkpoints.exists() else set()


def _newest(run: Run) -> int:
    return max((int(tag.removeprefix("global_step")) for tag in run.seen), default=0)


def judge(run: Run, reference: Sequence[Sequence[str]]) -> None:
    """Fault where the run did not end as an undisturbed one."""
    from dsplan.runtime.checkpoints.manifest import faults

    assert run.launcher is not None
    code = run.launcher.wait(LIMIT_SECONDS)
    if code != 0:
        raise Fault(f"the launch ended with {code}")
    wait_for("the end of all processes", lambda: not run.processes(), 30)
    left = [path.name for path in run.temporary.iterdir() if path.name.startswith("dsplan_") and "run" not in path.name]
    if left:
        raise Fault(f"temporary folders are left: {left}")
    names = {path.name for path in run.checkpoints.iterdir()}
    wanted = {f"global_step{step}" for step in range(1, run.steps + 1)}
    if lost := (run.seen | {f"global_step{run.steps}"}) - names:
        raise Fault(f"checkpoints are lost: {sorted(lost)}")
    if strange := names - wanted - {"latest"}:
        raise Fault(f"what is no checkpoint is left: {sorted(strange)}")
    for name in sorted(names - {"latest"}):
        if found := faults(run.checkpoints / name):
            raise Fault(f"{name} is damaged: {found}")
    if (run.checkpoints / "latest").read_text() != f"global_step{run.steps}":
        raise Fault("latest does not name the last checkpoint")
    for rank, expected in enumerate(reference):
        told = set((run.folder / f"losses_{rank}.txt").read_text().splitlines())
        if other := told - set(expected):
            raise Fault(f"rank {rank} had other losses than an undisturbed run: {sorted(other)[:3]}")
        if expected[-1] not in told:
            raise Fault(f"rank {rank} did not reach step {run.steps}")


def disturbed_runs(
    kills: int, seed: int, reference: Sequence[Sequence[str]], folder: Path, *, per_run: int = 5, ranks: int = 2
) -> int:
    """Kill so often, in as many runs as that takes; how many runs. Fault with the run's log where one breaks."""
    dice = random.Random(seed)
    killed = runs = 0
    while killed < kills:
        most = min(per_run, kills - killed)
        run = Run(folder / f"run_{runs}", ranks, len(reference[0]), restarts=most, background=dice.random() < 0.5)
        run.folder.mkdir(parents=True)
        runs += 1
        try:
            run.launch()
            for _ in range(most):
                told = kill_once(run, dice)
                if told is None:
                    break
                killed += 1
                print(f"kill {killed}: {told}{', async' if run.background else ''}", flush=True)
            judge(run, reference)
        except Fault as fault:
            log = (run.folder / "log.txt").read_text(errors="replace")[-4000:]
            raise Fault(f"run {runs} (seed {seed}): {fault}\n{log}") from fault
        finally:
            run.end()
    return runs


def undisturbed(folder: Path, steps: int, ranks: int) -> list[list[str]]:
    run = Run(folder / "undisturbed", ranks, steps, restarts=0)
    run.folder.mkdir(parents=True)
    run.launch()
    try:
        assert run.launcher is not None
        if run.launcher.wait(LIMIT_SECONDS) != 0:
            raise Fault(f"the undisturbed run failed:\n{(run.folder / 'log.txt').read_text()}")
        return [(run.folder / f"losses_{rank}.txt").read_text().splitlines() for rank in range(ranks)]
    finally:
        run.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train, options.steps)
        return
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kill_runs_") as folder:
        try:
            reference = undisturbed(Path(folder), options.steps, options.ranks)
            runs = disturbed_runs(options.kills, options.seed, reference, Path(folder), ranks=options.ranks)
        except Fault as fault:
            sys.exit(f"FAULT: {fault}")
    print(
        f"{options.kills} kills in {runs} runs, {time.monotonic() - begun:.0f} s: every run ended as the undisturbed one"
    )


if __name__ == "__main__":
    main()
