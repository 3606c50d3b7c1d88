"""Ask DeepSpeed 0.19.8 what its CSV monitor writes: `DS_ACCELERATOR=cpu python tests/oracle/csv_monitor.py`, beside csv_monitor.json."""

import json
import os
import tempfile
from pathlib import Path

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 1e-3}},
    "wall_clock_breakdown": True,
    "csv_monitor": {"enabled": True, "job_name": "job"},
}
STEPS = 4


def train(initialize, folder):
    """Four steps of one linear on constant samples."""
    import torch

    torch.manual_seed(0)
    config = {**CONFIG, "csv_monitor": {**CONFIG["csv_monitor"], "output_path": folder}}
    engine, *_ = initialize(model=torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)), config=config)
    for number in range(2 * STEPS):
        engine.backward(engine(torch.ones(2, 8) * number).square().mean())
        engine.step()
    return {path.name: path.read_bytes().decode() for path in sorted((Path(folder) / "job").iterdir())}


if __name__ == "__main__":
    import deepspeed

    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29671",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
    }
    deepspeed.init_distributed("gloo")
    with tempfile.TemporaryDirectory() as folder:
        written = train(deepspeed.initialize, folder)
    Path(__file__).with_suffix(".json").write_text(json.dumps(written, indent=2) + "\n", "utf-8")
