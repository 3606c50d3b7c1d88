"""Monitors and reports of a real run, against what DeepSpeed wrote and what is counted by hand."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
from dsplan.runtime.measuring.asked import wrong_values
from dsplan.runtime.measuring.meter import Meter
from dsplan.runtime.measuring.monitors import COMET_SAMPLES, comet_writer, csv_writer, enabled_blocks, wandb_writer
from dsplan.schemas.problem import Problem
from ranks import run_ranks

ORACLE = Path(__file__).parents[1] / "oracle"
MACS_PER_TOKEN = 3 * 2 * 16 * 48 + 16 * 11
"""Of helpers/training.py's net: three blocks of two linears, and the head."""


def monitored(folder):
    sys.path.insert(0, str(ORACLE))
    from csv_monitor import train
    from dsplan.runtime import initialize

    return train(initialize, folder)


def test_csv_files_are_deepspeeds(tmp_path):
    """Names, columns, line ends, samples and learning rates; times by their rows alone. DeepSpeed splits backward too."""
    wrote = json.loads((ORACLE / "csv_monitor.json").read_text("utf-8"))
    [mine] = run_ranks(1, monitored, str(tmp_path))
    assert mine["Train_Samples_lr.csv"] == wrote["Train_Samples_lr.csv"]
    for part in ("forward", "backward", "step"):
        name = f"Train_Samples_elapsed_time_ms_{part}.csv"
        rows, theirs = ([line.split(",") for line in text.splitlines()] for text in (mine[name], wrote[name]))
        assert rows[0] == theirs[0]
        assert [row[0] for row in rows] == [row[0] for row in theirs]
    assert mine["Train_Samples_train_loss.csv"].startswith("step,train_loss\r\n4,")


def reported(folder):
    """(what rank 0 printed, the losses of each step over both ranks) of four steps with every report on."""
    import contextlib
    import io

    import torch
    import torch.distributed as dist
    from dsplan.runtime import initialize, log_summary
    from training import Net, batches, loss_of

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "steps_per_print": 2,
        "wall_clock_breakdown": True,
        "memory_breakdown": True,
        "flops_profiler": {"enabled": True, "profile_step": 1, "output_file": f"{folder}/flops.txt"},
        "comms_logger": {"enabled": True},
        "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "job"},
        "dsplan": {"meter_steps": [3]},
    }
    torch.manual_seed(0)
    told, losses = io.StringIO(), []
    with contextlib.redirect_stderr(told), contextlib.redirect_stdout(told):
        engine, *_ = initialize(model=Net(), config=config)
        for tokens in batches(4):
            total = torch.zeros(())
            for part in tokens[4 * dist.get_rank() :][:4].split(2):
                loss = loss_of(engine(part), part)
                engine.backward(loss)
                engine.step()
                total += loss.detach() / 4
            dist.all_reduce(total)
            losses.append(total.item())
        summary = log_summary(return_dict=True)["summary"]
    assert set(engine.get_wall_clock_timers()) == {"fwd", "bwd", "step"}
    counts = {  # without the gradient norm and the like
        kind: sum(line["count"] for line in sizes.values() if line["msg_size_bytes"] > 64)
        for kind, sizes in summary.items()
    }
    return told.getvalue(), losses, counts, [moment.phase for moment in engine.meter.ledger.moments]


def test_every_report_of_one_run(tmp_path):
    (told, losses, counts, phases), (silent, *_) = run_ranks(2, reported, str(tmp_path))
    lines = told.splitlines()
    assert [line.split(":")[1] for line in lines if "forward" in line and "between" in line] == [
        " step 2", " step 3", " step 4",
    ]  # fmt: skip
    assert [line.split(",")[0] for line in lines if "skipped=" in line] == ["dsplan: step=2", "dsplan: step=4"]
    assert f"loss={losses[1]:.6g}" in told
    assert [line for line in lines if line.startswith("dsplan: memory of rank 0 at step")] == [
        "dsplan: memory of rank 0 at step 3, in KiB (measured)"
    ]
    assert phases == ["forward", "backward", "step"]
    # 3 blocks in both directions of 2 micro-batches and the root once, in 4 steps; 4 units of gradients in each micro-batch.
    assert (counts["all_gather"], counts["reduce_scatter"]) == (4 * (3 * 2 * 2 + 1), 4 * 2 * 4)
    assert "step=" not in silent and "memory of" not in silent
    written = (tmp_path / "job" / "Train_Samples_train_loss.csv").read_text("utf-8").split()
    assert [float(line.split(",")[1]) for line in written[1:]] == pytest.approx(losses, rel=1e-6)
    assert [line.split(",")[0] for line in written[1:]] == ["8", "16", "24", "32"]
    # 2 micro-batches of 2 x 4 tokens; a multiply-accumulate is two; backward twice the forward.
    flops = (tmp_path / "flops.txt").read_text("utf-8")
    forward = 2 * 16 * MACS_PER_TOKEN
    assert f"forward {forward / 1e3:.3g} kFLOP, forward and backward {3 * forward / 1e3:.3g} kFLOP" in flops
    assert "no MFU: the peak of this device is not known" in flops
    # The blocks together, though their list itself is never called: all but the head's 16 x 11.
    assert re.search(rf"blocks +ModuleList .* {1 - 16 * 11 / MACS_PER_TOKEN:.1%}\n", flops)


def test_a_missing_package_is_one_line_with_its_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    raw = {"tensorboard": {"enabled": True}, "comet": {"enabled": True}, "wandb": {"enabled": False}}
    with pytest.raises(
        Problem, match=r"^tensorboard.enabled and comet.enabled: not installed; pip install tensorboard comet_ml"
    ):
        enabled_blocks(raw)


def test_a_resumed_run_writes_on_without_a_second_header(tmp_path):
    for samples in (8, 16):
        csv_writer({"output_path": str(tmp_path)})([("Train/Samples/lr", 0.5, samples)])
    assert (tmp_path / "DeepSpeedJobName" / "Train_Samples_lr.csv").read_bytes() == b"step,lr\r\n8,0.5\r\n16,0.5\r\n"


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("", "utf-8")
    with pytest.raises(Problem, match="^csv_monitor: cannot make .*set csv_monitor.output_path to another folder"):
        csv_writer({"output_path": str(tmp_path / "file")})


class Service:
    """Stands for the packages wandb and comet_ml: keeps what it is told."""

    def __init__(self, fails=False):
        self.calls, self.fails = [], fails

    def init(self, **given):
        if self.fails:
            raise RuntimeError("no api key configured\nand more")
        self.calls.append(given)

    def start(self, **given):
        self.calls.append(given)
        return self

    def log(self, values, step):
        self.calls.append((values, step))

    def log_metric(self, name, value, step):
        self.calls.append((name, value, step))


def test_wandb_is_told_as_deepspeed_tells_it(monkeypatch):
    service = Service()
    monkeypatch.setitem(sys.modules, "wandb", service)
    wandb_writer({"team": "us", "group": "g"})([("Train/Samples/lr", 0.5, 8)])
    assert service.calls == [
        {"project": "deepspeed", "group": "g", "entity": "us"},
        ({"Train/Samples/lr": 0.5}, 8),
    ]
    monkeypatch.setitem(sys.modules, "wandb", Service(fails=True))
    with pytest.raises(Problem, match="^wandb did not start: no api key configured; set wandb.enabled to false"):
        wandb_writer({})


def test_comet_is_told_once_in_samples_log_interval(monkeypatch):
    service = Service()
    monkeypatch.setitem(sys.modules, "comet_ml", service)
    write = comet_writer({})
    for samples in (8, 8 + COMET_SAMPLES - 1, 8 + COMET_SAMPLES):
        write([("loss", 1.0, samples)])
    assert [step for _, _, step in service.calls[1:]] == [8, 108]


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        ({"wall_clock_breakdown": "yes"}, "/wall_clock_breakdown"),
        ({"csv_monitor": {"enabled": "yes"}}, "/csv_monitor/enabled"),
        ({"dsplan": {"meter_steps": [0]}}, "/dsplan/meter_steps/0"),
        ({"dsplan": {"compile": 1}}, "/dsplan/compile"),
        ({"flops_profiler": {"profile_step": 1.5}}, "/flops_profiler/profile_step"),
    ],
)
def test_values_that_cannot_be_meant_are_refused(raw, told):
    assert [pointer for pointer, refused, _ in wrong_values(raw) if refused] == [told]
    assert list(wrong_values({"steps_per_print": float("inf"), "wall_clock_breakdown": "auto"})) == []


class Counting:
    """An engine as far as meter and progress look at it."""

    skipped_steps = 0

    def __init__(self, global_steps, global_samples):
        import torch

        self.global_steps, self.global_samples, self.device = global_steps, global_samples, torch.device("cpu")

    def get_lr(self):
        return [0.1]

    def get_mom(self):
        return [0.9]

    def get_global_grad_norm(self):
        return 1.0


def test_a_resumed_run_counts_the_samples_of_its_own_time(monkeypatch, capsys):
    """8 samples within 2 seconds, whatever the run before it has seen."""
    from dsplan.runtime.measuring import progress_line

    clock = iter([100.0, 102.0])
    monkeypatch.setattr(progress_line.time, "perf_counter", lambda: next(clock))
    engine = Counting(0, 0)
    line = progress_line.ProgressLine(engine, 1)
    monkeypatch.setattr(line._loss, "take", lambda: 1.0)
    engine.global_steps, engine.global_samples = 50, 400  # a checkpoint is loaded
    line.forward_begins([])
    engine.global_steps, engine.global_samples = 51, 408
    line.step_ends()
    assert "samples/s=4" in capsys.readouterr().err


def test_the_meter_watches_the_first_steps_of_a_resumed_run():
    meter = Meter(Counting(50, 400))
    assert meter._wanted()
