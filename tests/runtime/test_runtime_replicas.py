"""Stage 0: a module computes on its masters where they have one dtype, and gradients are reduced where they lie."""

import contextlib
import io

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

WIDTH, BLOCKS = 32, 3
PARAMETERS = BLOCKS * (WIDTH * WIDTH + WIDTH)
FP32 = 4


def model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)))


CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}},
    "gradient_clipping": 0.1,
    "zero_optimization": {"stage": 0},
}


def micro_batches():
    return torch.randn(6, 2, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))


def trained():
    """Losses of three steps; whether forward computed with the masters; what the ledger calls gathered."""
    from dsplan.runtime import initialize
    from dsplan.runtime.measuring.meter import Meter

    with contextlib.redirect_stderr(io.StringIO()):
        engine, *_ = initialize(model=model(), config=CONFIG)
    meter = Meter(engine)
    engine.observers.append(meter)
    masters = {master.to_local().data_ptr() for master in engine.masters().values()}
    used, losses = set(), []
    for batch in micro_batches():
        output = engine(batch)
        used |= {parameter.data_ptr() for parameter in engine.module.parameters()}
        loss = output.square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    gathered = sum(
        item.bytes for moment in meter.ledger.moments for item in moment.items if item.category == "gathered_params"
    )
    return losses, used == masters, gathered


def by_ddp():
    net = nn.parallel.DistributedDataParallel(model())
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for number, batch in enumerate(micro_batches()):
        last = number % 2 == 1
        net.require_backward_grad_sync = last
        loss = net(batch).square().mean()
        (loss / 2).backward()
        losses.append(loss.item())
        if last:
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def test_it_computes_on_its_masters_and_learns_as_ddp_does():
    """Three steps of two micro-batches on two ranks, clipped."""
    plain = run_ranks(2, by_ddp)
    for (losses, in_place, gathered), expected in zip(run_ranks(2, trained), plain, strict=True):
        assert losses == pytest.approx(expected, rel=1e-6)
        assert in_place
        assert gathered == 0


def reduced():
    """Bytes of the storages that gradients lie in before the step, and the number of storages."""
    from dsplan.runtime import initialize

    with contextlib.redirect_stderr(io.StringIO()):
        engine, *_ = initialize(model=model(), config={**CONFIG, "gradient_accumulation_steps": 1})
    engine.backward(engine(micro_batches()[0]).square().mean())
    engine._sharded.drop_gathered()
    storages = [master.grad.to_local().untyped_storage() for master in engine.masters().values()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_gradients_lie_in_what_was_reduced():
    assert run_ranks(2, reduced) == [FP32 * PARAMETERS] * 2
