"""ZeRO stages train as one process of plain torch does on the whole batch."""

import pytest
from ranks import run_ranks
from training import engine_losses, plain_losses

STEPS = 20


def config_of(zero_stage, **more):
    return {"zero_optimization": {"stage": zero_stage}, "gradient_clipping": 0.0, **more}


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_fp32_losses_are_those_of_plain_torch(zero_stage):
    """Each rank builds its own random model, so this holds only if all are made equal to rank 0."""
    losses, norms = plain_losses("adamw", STEPS)
    for seen, seen_norms in run_ranks(2, engine_losses, config_of(zero_stage), "adamw", STEPS):
        assert seen == pytest.approx(losses, rel=1e-5)
        assert seen_norms == pytest.approx(norms, rel=1e-4)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_accumulation_and_clipping_change_nothing_but_the_order_of_sums(zero_stage):
    losses, norms = plain_losses("sgd", STEPS, clip=0.5)
    config = config_of(zero_stage, gradient_clipping=0.5, gradient_accumulation_steps=4)
    for seen, seen_norms in run_ranks(2, engine_losses, config, "sgd", STEPS):
        assert seen == pytest.approx(losses, rel=1e-5)
        assert seen_norms == pytest.approx(norms, rel=1e-4)


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_state_that_a_client_optimizer_brings_is_kept(zero_stage):
    """Adagrad makes its sums in its constructor, for whole parameters."""
    losses, _ = plain_losses("adagrad", STEPS)
    for seen, _ in run_ranks(2, engine_losses, config_of(zero_stage), "adagrad", STEPS):
        assert seen == pytest.approx(losses, rel=1e-5)


def test_one_rank_alone_trains_too():
    losses, _ = plain_losses("adamw", STEPS)
    [(seen, _)] = run_ranks(1, engine_losses, config_of(3), "adamw", STEPS)
    assert seen == pytest.approx(losses, rel=1e-5)


def test_uneven_shards_over_three_ranks_agree_with_each_other():
    """11 x 16 over 3 ranks has padding, which must not enter the norm."""
    first, *others = run_ranks(3, engine_losses, config_of(3), "sgd", 5)
    assert all(other == first for other in others)


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_bf16_stays_near_fp32(zero_stage):
    """bf16 keeps 8 bits: 2e-2 over 20 steps, and the masters in fp32 keep it from drifting."""
    losses, _ = plain_losses("adamw", STEPS)
    config = config_of(zero_stage, bf16={"enabled": True})
    for seen, _ in run_ranks(2, engine_losses, config, "adamw", STEPS):
        assert seen == pytest.approx(losses, rel=2e-2)


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_the_optimizer_of_the_json_is_torchs(adam_w_mode):
    optimizer = {"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.1, "adam_w_mode": adam_w_mode}}
    for seen, losses in run_ranks(2, json_and_torch_losses, config_of(2, optimizer=optimizer), adam_w_mode):
        assert seen == pytest.approx(losses, rel=1e-5)


def json_and_torch_losses(config, adam_w_mode):
    import torch
    from training import Net, batches, loss_of

    seen, _ = engine_losses(config, None, 10)
    torch.manual_seed(0)
    model = Net()
    kind = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    optimizer = kind(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses = []
    for tokens in batches(10):
        loss = loss_of(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return seen, losses
