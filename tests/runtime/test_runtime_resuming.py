"""A run that is resumed goes on as the one that was never stopped: the same numbers, bit for bit."""

import pytest
from ranks import run_ranks

STEPS = 3
PRECISIONS = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    # The first steps overflow and are skipped; the window then raises the scale.
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 2, "hysteresis": 1}},
}


def make(zero_stage, precision, *, seed=0, batch=None, keys=None, accumulation=2):
    """An engine on a net with dropout, a frozen and a tied parameter, two groups, accumulation and a schedule."""
    import torch
    from dsplan.runtime import initialize
    from torch import nn
    from training import Net, batches

    torch.manual_seed(seed)

    class Dropping(Net):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.2)
            self.blocks[0].norm.bias.requires_grad_(False)

        def forward(self, tokens):
            return super().forward(tokens) + self.drop(torch.ones(11))

    model = Dropping()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.dim() == 1], "weight_decay": 0.0},
        {"params": [parameter for parameter in trained if parameter.dim() > 1]},
    ]
    config = {
        **(batch or {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": accumulation}),
        "zero_optimization": {"stage": zero_stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 20}},
        "dsplan": keys or {},
        **PRECISIONS[precision],
    }
    data = list(torch.cat(batches(5)))
    engine, _, loader, _ = initialize(model=model, model_parameters=groups, config=config, training_data=data)
    return engine, loader


def go_on(engine, iterator, micro_batches):
    """Losses of each micro-batch on this rank, and what Python's generator says next."""
    import random

    from training import loss_of

    losses = []
    for _ in range(micro_batches):
        try:
            tokens = next(iterator)
        except StopIteration:
            iterator = iter(engine.training_dataloader)
            tokens = next(iterator)
        loss = loss_of(engine(tokens), tokens)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return [*losses, random.random()]


def stop_and_go(folder, zero_stage, precision):
    """(losses after the save in the run that saved, losses of the resumed run), and what both ended at."""
    import random

    engine, loader = make(zero_stage, precision)
    iterator = iter(loader)
    go_on(engine, iterator, 2 * STEPS)
    engine.save_checkpoint(folder, client_state={"seen": (1, 2), "by": {3: 0.5}})
    losses = go_on(engine, iterator, 3 * STEPS)
    ended = (engine.get_lr(), engine.loss_scale, engine.skipped_steps, engine.global_steps, engine.micro_steps)

    random.seed(5)
    resumed, loader = make(zero_stage, precision, seed=7)
    path, client_state = resumed.load_checkpoint(folder)
    assert path == f"{folder}/global_step{STEPS}" and client_state == {"seen": (1, 2), "by": {3: 0.5}}
    again = go_on(resumed, iter(loader), 3 * STEPS)
    ended_again = (
        resumed.get_lr(),
        resumed.loss_scale,
        resumed.skipped_steps,
        resumed.global_steps,
        resumed.micro_steps,
    )
    return losses, again, ended, ended_again


@pytest.mark.parametrize(
    ("zero_stage", "precision"),
    [(0, "fp32"), (1, "bf16"), (2, "fp32"), (3, "fp32"), (3, "bf16"), (1, "fp16"), (3, "fp16")],
)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(tmp_path, zero_stage, precision):
    """10 micro-batches an epoch on each rank: the save is within the first, the run goes on into the second."""
    for losses, again, ended, ended_again in run_ranks(2, stop_and_go, str(tmp_path), zero_stage, precision):
        assert again == losses
        assert ended_again == ended
        if precision == "fp16":
            assert ended[2] > 0  # skipped
