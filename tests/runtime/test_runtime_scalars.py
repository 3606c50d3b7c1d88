"""Parameters without a dimension (CLIP's logit_scale) train as any other, at each ZeRO stage."""

import pytest
from ranks import run_ranks

STEPS = 8
NAMES = ["temperature", "blocks.1.gain"]


def make_net():
    import torch
    from training import Net

    class Scaled(Net):
        """The head's logits times exp(temperature); one scalar more inside a block."""

        def __init__(self):
            super().__init__()
            self.temperature = torch.nn.Parameter(torch.tensor(0.5))
            self.unused = torch.nn.Parameter(torch.tensor(3.0))
            self.frozen = torch.nn.Parameter(torch.tensor(2.0), requires_grad=False)
            self.blocks[1].gain = torch.nn.Parameter(torch.tensor(0.7))
            self.blocks[1].register_forward_hook(lambda block, _, output: output * block.gain)

        def forward(self, tokens):
            return super().forward(tokens) * self.temperature.exp() * (self.frozen / 2)

    return Scaled()


def plain(clip):
    import torch
    from training import batches, loss_of

    torch.manual_seed(0)
    model = make_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses, norms = [], []
    for tokens in batches(STEPS):
        loss = loss_of(model(tokens), tokens)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, {name: model.get_parameter(name).item() for name in [*NAMES, "unused", "frozen"]}


def trained(zero_stage, precision, clip, client, stop=None, folder=None, load=False):
    """(losses, norms, scalars at the end) of two micro-batches a step; steps from the checkpoint's on where it is loaded."""
    import torch
    import torch.distributed as dist
    from dsplan.runtime import initialize
    from training import SAMPLES, batches, loss_of

    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = make_net()
    if client:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    config = {
        "train_batch_size": SAMPLES,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": zero_stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        precision: {"enabled": True},
    }
    engine, _, _, _ = initialize(model=model, optimizer=optimizer if client else None, config=config)
    if load:
        engine.load_checkpoint(folder)
    losses, norms = [], []
    for tokens in batches(stop or STEPS)[engine.global_steps :]:
        total = torch.zeros(())
        for part in tokens.chunk(world)[rank].chunk(2):
            loss = loss_of(engine(part), part)
            engine.backward(loss)
            engine.step()
            total += loss.detach() / 2
        dist.all_reduce(total)
        losses.append(total.item() / world)
        norms.append(engine.get_global_grad_norm())
    if folder and not load:
        engine.save_checkpoint(folder)
        engine.save_16bit_model(folder, "whole.bin")
    return losses, norms, {name: model.get_parameter(name).item() for name in [*NAMES, "unused", "frozen"]}


@pytest.mark.parametrize(("zero_stage", "client"), [(0, False), (1, True), (2, False), (3, True), (3, False)])
def test_scalars_train_and_count_in_the_norm_as_in_plain_torch(zero_stage, client):
    """The ranks begin with different models, and clip. What no loss reaches is not even decayed."""
    losses, norms, scalars = plain(0.5)
    for seen, seen_norms, seen_scalars in run_ranks(2, trained, zero_stage, "fp32", 0.5, client):
        assert seen == pytest.approx(losses, rel=1e-5)
        assert seen_norms == pytest.approx(norms, rel=1e-4)
        assert seen_scalars == pytest.approx(scalars, rel=1e-5)
        assert (seen_scalars["unused"], seen_scalars["frozen"]) == (3.0, 2.0)


def test_scalars_in_bf16_keep_masters_in_fp32():
    """bf16 keeps 8 bits: 2e-2 of the losses. exp(temperature) in bf16 alone would move in steps of 2**-9."""
    losses, _, scalars = plain(0.5)
    first, second = run_ranks(2, trained, 2, "bf16", 0.5, False)
    assert first == second
    assert first[0] == pytest.approx(losses, rel=2e-2)
    assert first[2] == pytest.approx(scalars, rel=2e-2)
    assert first[2]["temperature"] * 2**12 % 1 != 0


@pytest.mark.parametrize(("saved", "loaded"), [(3, 0), (0, 2)])
def test_scalars_and_their_states_are_saved_and_loaded(tmp_path, saved, loaded):
    import torch

    whole = run_ranks(2, trained, saved, "fp32", 0.0, False)[0]
    [first, _] = run_ranks(2, trained, saved, "fp32", 0.0, False, 5, str(tmp_path))
    rest = run_ranks(2, trained, loaded, "fp32", 0.0, False, STEPS, str(tmp_path), True)[0]
    assert rest[0] == pytest.approx(whole[0][5:], rel=1e-5)
    assert rest[2] == pytest.approx(whole[2], rel=1e-5)
    held = torch.load(tmp_path / "whole.bin", weights_only=True)
    assert {name: held[name].item() for name in NAMES} == pytest.approx({name: first[2][name] for name in NAMES})
