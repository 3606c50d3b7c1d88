"""Monitors: each step's loss, learning rate and loss scale as CSV files, TensorBoard events, or in wandb and comet.

Tags, files and columns are DeepSpeed's; the x axis counts samples. Rank 0 writes. Source: deepspeed/monitor/ (0.19.8), and
its pipeline engine for train_loss, which its other engine has ceased to write.
"""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from dsplan.runtime.measuring.observing import Observer
from dsplan.runtime.measuring.step_loss import StepLoss
from dsplan.schemas.problem import Problem

if TYPE_CHECKING:
    from dsplan.runtime.engine import Engine

Event = tuple[str, float, int]
"""(tag, value, samples so far)."""
Writer = Callable[[Sequence[Event]], None]
PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}
"""What a block needs installed."""
DEFAULT_JOB = "DeepSpeedJobName"
"""Source: deepspeed/monitor/config.py, job_name."""
COMET_SAMPLES = 100
"""Source: deepspeed/monitor/config.py, CometConfig.samples_log_interval."""


class Monitor(Observer):
    """engine.monitor: the blocks that are on. Of every rank, since the loss is the mean over ranks; only rank 0 has writers."""

    def __init__(self, engine: Engine, raw: Mapping[str, Any]):
        blocks = enabled_blocks(raw)
        self.enabled = bool(blocks)
        self._engine = engine
        self._loss = StepLoss(engine.device)
        self._writers = [WRITERS[name](block) for name, block in blocks.items() if dist.get_rank() == 0]

    def write_events(self, events: Sequence[Event]) -> None:
        """What a script has to tell besides, in DeepSpeed's form. Does nothing on other ranks than 0."""
        for write in self._writers:
            write(events)

    def backward_ends(self, loss: torch.Tensor) -> None:
        self._loss.add(loss)

    def step_ends(self) -> None:
        engine = self._engine
        values = {"train_loss": self._loss.take()}
        if engine.optimizer is not None:
            values["lr"] = float(engine.optimizer.param_groups[0]["lr"])
        if engine.scaler is not None:
            values["loss_scale"] = float(engine.scaler.value)
        if engine.wall_clock is not None:
            phases = engine.wall_clock.phases
            values |= {f"elapsed_time_ms_{name}": phases[name] * 1e3 for name in ("forward", "backward", "step")}
        self.write_events([(f"Train/Samples/{name}", value, engine.global_samples) for name, value in values.items()])


def enabled_blocks(raw: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The monitors that the config switches on. Problem on every rank where the package of one is missing."""
    blocks = {name: raw[name] for name in WRITERS if isinstance(raw.get(name), Mapping)}
    blocks = {name: block for name, block in blocks.items() if block.get("enabled") is True}
    missing = [name for name in blocks if name in PACKAGES and importlib.util.find_spec(PACKAGES[name]) is None]
    if missing:
        packages = " ".join(PACKAGES[name] for name in missing)
        raise Problem(
            f"{' and '.join(f'{name}.enabled' for name in missing)}: not installed; pip install {packages}, or set enabled "
            "to false"
        )
    return blocks


def _folder(block: Mapping[str, Any], name: str) -> Path:
    """output_path/job_name, made. Problem where it cannot be."""
    path = Path(block.get("output_path") or "") / (block.get("job_name") or DEFAULT_JOB)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Problem(
            f"{name}: cannot make {path}: {error.strerror}; set {name}.output_path to another folder"
        ) from error
    return path


def csv_writer(block: Mapping[str, Any]) -> Writer:
    """A file per tag, Train_Samples_lr.csv for Train/Samples/lr, with columns step (in samples) and the tag's last part."""
    folder = _folder(block, "csv_monitor")

    def write(events: Sequence[Event]) -> None:
        for tag, value, samples in events:
            path = folder / f"{tag.replace('/', '_').replace(' ', '_')}.csv"
            with path.open("a", newline="", encoding="utf-8") as file:
                rows = csv.writer(file)
                if file.tell() == 0:  # a run that goes on writes on
                    rows.writerow(["step", tag.rpartition("/")[2]])
                rows.writerow([samples, value])

    return write


def tensorboard_writer(block: Mapping[str, Any]) -> Writer:
    """One event file in output_path/job_name."""
    from torch.utils.tensorboard import SummaryWriter

    summary: Any = SummaryWriter(log_dir=str(_folder(block, "tensorboard")))

    def write(events: Sequence[Event]) -> None:
        for event in events:
            summary.add_scalar(*event)
        summary.flush()

    return write


def wandb_writer(block: Mapping[str, Any]) -> Writer:
    import wandb

    _started(
        "wandb",
        lambda: wandb.init(
            project=block.get("project", "deepspeed"), group=block.get("group"), entity=block.get("team")
        ),
    )

    def write(events: Sequence[Event]) -> None:
        for tag, value, samples in events:
            wandb.log({tag: value}, step=samples)

    return write


def comet_writer(block: Mapping[str, Any]) -> Writer:
    """A tag's value at most once in samples_log_interval samples."""
    import comet_ml

    names = {"api_key": "api_key", "project": "project", "workspace": "workspace", "experiment_key": "experiment_key"}
    names |= {"mode": "mode", "online": "online"}
    experiment = _started("comet", lambda: comet_ml.start(**{name: block.get(key) for name, key in names.items()}))
    if block.get("experiment_name") is not None:
        experiment.set_name(block["experiment_name"])
    interval = block.get("samples_log_interval", COMET_SAMPLES)
    last: dict[str, int] = {}

    def write(events: Sequence[Event]) -> None:
        for tag, value, samples in events:
            if tag not in last or samples - last[tag] >= interval:
                last[tag] = samples
                experiment.log_metric(name=tag, value=value, step=samples)

    return write


def _started(name: str, start: Callable[[], Any]) -> Any:
    """Problem where the service cannot be reached or does not know the user: training without it is for the user to choose."""
    try:
        return start()
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise Problem(f"{name} did not start: {reason}; set {name}.enabled to false to train without it") from error


WRITERS: dict[str, Callable[[Mapping[str, Any]], Writer]] = {
    "tensorboard": tensorboard_writer,
    "wandb": wandb_writer,
    "csv_monitor": csv_writer,
    "comet": comet_writer,
}
