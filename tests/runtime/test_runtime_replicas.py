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


class Wrong(RuntimeError):
    pass


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise Wrong


class Twice(nn.Module):
    """Its first block runs twice, and one never does."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x, fails=False):
        x = self.blocks[1](self.blocks[0](x))
        x = Raises.apply(x) if fails else x
        return self.head(self.blocks[0](x))


def losses_of(step, forward):
    """Of 20 steps; the third step's first backward raises and is caught; before the fifth all weights are halved."""
    losses = []
    for number in range(20):
        batch = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
        loss = forward(batch).square().mean()
        losses.append(loss.item())
        step(number, batch, loss)
    return losses


def in_the_engine(zero_stage):
    from dsplan.runtime import initialize

    with contextlib.redirect_stderr(io.StringIO()):
        engine, *_ = initialize(
            model=Twice(),
            config={
                **CONFIG,
                "gradient_accumulation_steps": 1,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
                "zero_optimization": {"stage": zero_stage},
            },
        )

    def step(number, batch, loss):
        if number == 2:
            with contextlib.suppress(Wrong):
                engine.backward(engine(batch, fails=True).square().mean())
            engine.zero_grad()
            loss = engine(batch).square().mean()
        engine.backward(loss)
        engine.step()
        if number == 4:
            for parameter in engine.module.parameters():
                parameter.data.mul_(0.5)

    return losses_of(step, engine)


def plainly():
    net = Twice()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1)

    def step(number, batch, loss):
        loss.backward()
        for parameter in net.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        if number == 4:
            for parameter in net.parameters():
                parameter.data.mul_(0.5)

    return losses_of(step, net)


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_blocks_run_twice_and_never_caught_exceptions_and_changed_weights(zero_stage):
    """Against plain PyTorch whose gradients are averaged by hand; what is not used has gradients of zeros."""
    for losses, expected in zip(run_ranks(2, in_the_engine, zero_stage), run_ranks(2, plainly), strict=True):
        assert losses == pytest.approx(expected, rel=1e-5)
