"""loss.backward() and engine.scale(loss).backward() in place of engine.backward(loss)."""

import pytest
from ranks import run_ranks


@pytest.mark.parametrize(("zero_stage", "precision"), [(0, "fp32"), (1, "fp32"), (3, "fp32"), (2, "fp16")])
def test_a_backward_that_the_script_begins_trains_as_the_engines(zero_stage, precision):
    for own, plain, told in run_ranks(2, both_ways, zero_stage, precision):
        assert own == plain
        assert told == 3


def engine_of(zero_stage, precision="fp32", accumulation=2, **more):
    import torch
    from dsplan.runtime import initialize
    from training import Net

    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": zero_stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        **more,
    }
    if precision != "fp32":
        config[precision] = {"enabled": True, **({"initial_scale_power": 4} if precision == "fp16" else {})}
    return initialize(model=Net(), config=config)[0]


def both_ways(zero_stage, precision):
    import torch.distributed as dist
    from dsplan.runtime.measuring.observing import Observer
    from training import batches, loss_of

    def train(backward):
        engine = engine_of(zero_stage, precision)
        seen = []

        class Listens(Observer):
            def backward_ends(self, loss):
                seen.append(loss)

        engine.observers.append(Listens())
        found = []
        for tokens in batches(3):
            for part in tokens.split(2)[2 * dist.get_rank() :][:2]:
                loss = loss_of(engine(part), part)
                backward(engine, loss)
                engine.step()
            found += [loss.item(), engine.get_global_grad_norm()]
        return found, engine.global_steps, len(seen)

    own, steps, _ = train(lambda engine, loss: engine.backward(loss))
    if precision == "fp16":
        plain, _, heard = train(lambda engine, loss: engine.scale(loss).backward())
    else:
        plain, _, heard = train(lambda engine, loss: loss.backward())
    assert heard == 6
    return own, plain, steps


def test_two_outputs_and_a_gradient_of_ones_own():
    [(losses, plain)] = run_ranks(1, outputs_and_gradients)
    assert losses == pytest.approx(plain, rel=1e-6)


def outputs_and_gradients():
    """Two forwards before one backward, as DPO has it, from a tensor with its gradient given."""

    import torch
    from training import Net, batches

    engine = engine_of(3, accumulation=1, gradient_clipping=0.0)
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses, plain = [], []
    for tokens in batches(3):
        out = engine(tokens[:2]) - engine(tokens[2:4])
        losses.append(out.square().mean().item())
        out.backward(out.detach())
        engine.step()
        out = model(tokens[:2]) - model(tokens[2:4])
        plain.append(out.square().mean().item())
        out.backward(out.detach())
        optimizer.step()
        optimizer.zero_grad()
    assert engine.global_steps == 3
    return losses, plain


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_a_penalty_on_the_gradient_of_the_inputs_is_plain_torchs(zero_stage):
    """torch.autograd.grad through an engine: no backward of a step, and neither divided nor scaled."""
    for losses, plain in run_ranks(2, penalised, zero_stage):
        assert losses == pytest.approx(plain, rel=1e-6)


def penalised(zero_stage):
    import copy

    import torch
    from dsplan.runtime import initialize
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
            self.last = nn.Linear(4, 1)

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return self.last(x)

    torch.manual_seed(0)
    model = Net()
    other = copy.deepcopy(model)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    engine, _, _, _ = initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": zero_stage},
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        },
    )

    def loss_by(net, x):
        out = net(x)
        [slope] = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.mean() + slope.square().sum()

    losses, plain = [], []
    for _ in range(3):
        parts = [torch.randn(2, 4, requires_grad=True) for _ in range(2)]
        for part in parts:
            loss = loss_by(engine, part)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        for part in parts:
            loss = loss_by(other, part)
            (loss / 2).backward()
            plain.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, plain


def test_what_would_go_wrong_is_one_line():
    for rank, found in enumerate(run_ranks(2, wrong_uses)):
        assert found == [
            "loss.backward() is called, but this precision scales the loss; call engine.backward(loss), or "
            "engine.scale(loss).backward()",
            "loss.backward() goes through a forward whose input was computed with gradients, so that what lies before it would "
            "be divided by accumulation 2 twice; call engine.backward(loss)",
            "loss.backward() is called, but dsplan.stop_on_nan_loss is true; call engine.backward(loss), or "
            "engine.scale(loss).backward()",
            f"rank {rank}: backward needs one number as loss, but got shape [2]; take the mean or the sum",
        ]


def wrong_uses():
    import torch
    from dsplan.runtime import initialize
    from dsplan.schemas.problem import Problem
    from torch import nn
    from training import batches, loss_of

    [tokens] = batches(1)
    found = []

    def refused(act):
        with pytest.raises(Problem) as caught:
            act()
        found.append(str(caught.value))

    halves = engine_of(1, "fp16")
    refused(lambda: loss_of(halves(tokens), tokens).backward())
    chained, _, _, _ = initialize(
        model=nn.Linear(4, 4),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        },
    )
    refused(lambda: chained(chained(torch.ones(2, 4))).sum().backward())
    careful = engine_of(1, dsplan={"stop_on_nan_loss": True})
    refused(lambda: loss_of(careful(tokens), tokens).backward())
    refused(lambda: careful.scale(careful(tokens).mean(dim=(1, 2))[:2]))
    return found
