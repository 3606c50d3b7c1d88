"""The HF Trainer and Accelerate on the stand-in for deepspeed, as under a launch: they train what plain PyTorch trains."""

import pytest
from ranks import run_ranks

STEPS, LR = 4, 0.05
RANKS = 2


def test_the_hf_trainer_trains_saves_and_resumes(tmp_path):
    """At stages 2 and 3 its losses are those of plain PyTorch on the same samples; resumed from the middle, the same."""
    for told, resumed, names in run_ranks(RANKS, trainer, str(tmp_path))[0]:
        assert told == pytest.approx(plain(), rel=2e-4)  # it logs rounded to four digits
        assert resumed == told[STEPS // 2 :]
        assert names == ["down.bias", "down.weight", "up.bias", "up.weight"]


def test_accelerate_trains_and_saves(tmp_path):
    (losses, names), _ = run_ranks(RANKS, accelerated, str(tmp_path))
    assert losses == pytest.approx(plain(), rel=1e-6)
    assert names == ["down.bias", "down.weight", "up.bias", "up.weight"]


def plain():
    """Losses of STEPS steps on all ranks' samples."""
    import torch

    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses = []
    for step in range(STEPS):
        batch = torch.stack([sample["x"] for sample in _samples()[step * 2 * RANKS :][: 2 * RANKS]])
        loss = model(batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trainer(folder):
    with _as_under_a_launch():
        return [_trained(f"{folder}/{zero_stage}", zero_stage) for zero_stage in (2, 3)]


def _trained(folder, zero_stage):
    """(losses, losses of the second half after a resume, names in the saved file)."""
    from safetensors.torch import load_file
    from transformers import Trainer, TrainingArguments

    def run(resume):
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=2,
            learning_rate=LR,
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_steps=STEPS // 2,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            train_sampling_strategy="sequential",
            deepspeed={
                "train_micro_batch_size_per_gpu": "auto",
                "gradient_accumulation_steps": "auto",
                "gradient_clipping": "auto",
                "zero_optimization": {"stage": zero_stage, "stage3_gather_16bit_weights_on_model_save": True},
                "optimizer": {"type": "SGD", "params": {"lr": "auto"}},
            },
        )
        made = Trainer(model=_model(), args=arguments, train_dataset=_samples())
        made.train(resume_from_checkpoint=resume)
        made.save_model(f"{folder}/model")
        return [line["loss"] for line in made.state.log_history if "loss" in line]

    told = run(None)
    resumed = run(f"{folder}/checkpoint-{STEPS // 2}")
    return told, resumed[-(STEPS // 2) :], sorted(load_file(f"{folder}/model/model.safetensors"))


def accelerated(folder):
    with _as_under_a_launch():
        import torch
        from accelerate import Accelerator, DeepSpeedPlugin
        from safetensors.torch import load_file

        accelerator = Accelerator(
            cpu=True,
            deepspeed_plugin=DeepSpeedPlugin(
                hf_ds_config={
                    "train_micro_batch_size_per_gpu": 2,
                    "gradient_clipping": 0.0,
                    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
                }
            ),
        )
        model = _model()
        loader = torch.utils.data.DataLoader(_samples(), batch_size=2)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=LR), loader)
        losses = []
        for batch, _ in zip(loader, range(STEPS), strict=False):
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
        accelerator.save_model(model, folder)
        accelerator.wait_for_everyone()
        return losses, sorted(load_file(f"{folder}/model.safetensors"))


def _as_under_a_launch():
    """The stand-in on the path and the rank in the environment. What Accelerate keeps of the process group is forgotten after."""
    import contextlib
    import os
    import sys
    from pathlib import Path
    from unittest import mock

    import dsplan.runtime.launching
    import torch.distributed as dist

    @contextlib.contextmanager
    def around():
        place = {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
        stand_in = str(Path(dsplan.runtime.launching.__path__[0]) / "stand_in")
        with mock.patch.dict(os.environ, place), mock.patch.object(sys, "path", [stand_in, *sys.path]):
            from accelerate.state import AcceleratorState, GradientState

            yield
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()

    return around()


def _model():
    import torch
    from torch import nn

    class Model(nn.Module):
        """x -> the mean of a square."""

        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, x):
            return {"loss": self.down(torch.relu(self.up(x))).square().mean()}

    torch.manual_seed(0)
    return Model()


def _samples():
    """In the order in which the ranks take them: 2 of rank 0, 2 of rank 1, and so on."""
    import torch

    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(8, generator=generator)} for _ in range(2 * RANKS * STEPS)]
