"""zero.GatheredParameters and zero.Init: whole parameters, whose changes reach every rank or none."""

import pytest
from ranks import run_ranks

STAGES = [0, 1, 2, 3]


def engine_of(zero_stage, **config):
    import torch
    import torch.distributed as dist
    from dsplan.runtime import initialize
    from training import Net

    torch.manual_seed(dist.get_rank())
    model = Net()
    model.scale = torch.nn.Parameter(torch.tensor(1.5))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": zero_stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        **config,
    }
    return initialize(model=model, config=config)[0]


@pytest.mark.parametrize("zero_stage", STAGES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_modifier_ranks_values_are_those_of_every_rank_and_of_the_masters(zero_stage, precision):
    """SGD of one step from weights that one rank has set: the very step that plain torch makes from them."""
    expected = [2.0, 3.0, 0.25]
    for inside, after, stepped in run_ranks(2, modify, zero_stage, precision):
        assert inside == [("float32", [11, 16]), ("float32", [48]), ("float32", [])]
        assert after == expected
        assert stepped == pytest.approx(expected, abs=1e-6)  # their gradients are zero: nothing was lost on the way


def modify(zero_stage, precision):
    import torch
    import torch.distributed as dist
    from dsplan.runtime import zero
    from training import batches

    engine = engine_of(zero_stage, **({} if precision == "fp32" else {precision: {"enabled": True}}))
    model = engine.module
    [tokens] = batches(1)
    engine.backward(engine(tokens[:4]).square().mean())  # as in the middle of training
    engine.step()
    members = [model.tokens.weight, model.blocks[1].up.bias, model.scale]
    with zero.GatheredParameters(members, modifier_rank=1):
        inside = [(str(member.dtype)[6:], list(member.shape)) for member in members]
        assert model.tokens.weight is members[0] and isinstance(members[0], torch.nn.Parameter)
        assert type(members[0].data) is torch.Tensor
        if dist.get_rank() == 1:
            members[0].data.fill_(2.0)
            with torch.no_grad():
                members[1].fill_(3.0)
            members[2].data = torch.tensor(0.25)

    def values():
        with zero.GatheredParameters(members):
            assert all(member.unique().numel() == 1 for member in members)
            return [member.flatten()[0].item() for member in members]

    after = values()
    engine.backward(engine(tokens[:4]).sum() * 0.0)
    engine.step()
    return inside, after, values()


@pytest.mark.parametrize("zero_stage", STAGES)
def test_without_a_modifier_rank_changes_are_dropped_and_training_goes_on_unharmed(zero_stage):
    for plain, seen in run_ranks(2, look_between, zero_stage):
        assert seen == plain


def look_between(zero_stage):
    import torch
    from dsplan.runtime import zero
    from training import batches

    def losses(look):
        engine = engine_of(zero_stage, gradient_accumulation_steps=2)
        found = []
        for tokens in batches(4):
            loss = engine(tokens[:4]).square().mean()
            engine.backward(loss)
            if look:
                with zero.GatheredParameters(engine.module.parameters()), torch.no_grad():
                    for parameter in engine.module.parameters():
                        parameter.zero_()
            engine.step()
            found.append(loss.item())
        return found

    return losses(False), losses(True)


def test_forward_and_generation_work_inside_and_nothing_stays_open_after_an_error():
    for outputs, shards in run_ranks(2, forward_inside):
        assert outputs[0] == outputs[1]
        assert shards


def forward_inside():
    import torch
    from dsplan.runtime import zero
    from torch.distributed.tensor import DTensor
    from training import batches

    engine = engine_of(3)
    [tokens] = batches(1)
    outputs = []
    with torch.no_grad():
        outputs.append(engine(tokens).sum().item())
        with pytest.raises(ZeroDivisionError), zero.GatheredParameters(engine.module.parameters(), modifier_rank=0):
            outputs.append(engine(tokens).sum().item())
            raise ZeroDivisionError
    return outputs, all(
        isinstance(parameter, DTensor) for parameter in engine.module.parameters() if parameter.dim() > 0
    )


def test_wrong_uses_are_one_line():
    nested, outside, reshaped = run_ranks(2, wrong_uses)[0]
    assert nested.endswith("an outer context has gathered this parameter already; leave that first")
    assert outside.endswith("modifier_rank is 2, but the ranks are 0 to 1")
    assert reshaped.endswith("a parameter of shape [11, 16] has become [3] inside; change its values, not its shape")


def wrong_uses():
    import torch
    from dsplan.runtime import zero
    from dsplan.schemas.problem import Problem

    weight = engine_of(3).module.tokens.weight
    messages = []
    with pytest.raises(Problem) as caught, zero.GatheredParameters(weight), zero.GatheredParameters([weight]):
        pass
    messages.append(str(caught.value))
    with pytest.raises(Problem) as caught:
        zero.GatheredParameters(weight, modifier_rank=2)
    messages.append(str(caught.value))
    with pytest.raises(Problem) as caught, zero.GatheredParameters(weight, modifier_rank=0):
        weight.data = torch.zeros(3)
    messages.append(str(caught.value))
    return messages


def test_a_model_built_under_init_trains_from_what_one_rank_made_of_it():
    """As plain torch does from the same weights; every rank drew its own."""
    for losses, plain in run_ranks(2, built_under_init):
        assert losses == pytest.approx(plain, rel=1e-6)


def built_under_init():
    import torch
    import torch.distributed as dist
    from dsplan.runtime import initialize, zero
    from training import SAMPLES, Net, batches, loss_of

    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
    }

    def give(model):
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.3, generator=generator)
            model.offset.zero_()
        return model

    torch.manual_seed(dist.get_rank())
    with zero.Init(config_dict_or_path=config, remote_device="cpu", enabled=True):
        model = Net()
    model.offset.zero_()
    with zero.GatheredParameters(list(model.parameters()), modifier_rank=1):
        if dist.get_rank() == 1:
            give(model)
    engine = initialize(model=model, config=config)[0]
    plain = give(Net())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    losses, plain_losses = [], []
    for tokens in batches(3):
        loss = loss_of(engine(tokens), tokens)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        loss = loss_of(plain(tokens), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        plain_losses.append(loss.item())
    return losses, plain_losses
