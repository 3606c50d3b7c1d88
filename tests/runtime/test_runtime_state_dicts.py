"""state_dict and load_state_dict of the module that the engine holds."""

import io

import pytest
from ranks import run_ranks


def engine_of(zero_stage):
    import torch
    import torch.distributed as dist
    from dsplan.runtime import initialize
    from training import Net

    torch.manual_seed(dist.get_rank())
    model = Net()
    model.scale = torch.nn.Parameter(torch.tensor(1.5))
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": zero_stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    return initialize(model=model, config=config)[0]


def plain_net(seed):
    import torch
    from training import Net

    torch.manual_seed(seed)
    model = Net()
    model.scale = torch.nn.Parameter(torch.tensor(1.5))
    return model


def test_at_stage_0_rank_0_alone_saves_a_file_that_plain_torch_loads():
    import torch

    content, second = run_ranks(2, saved_by_rank_0)
    assert second is None
    state = torch.load(io.BytesIO(content), weights_only=True)
    expected = plain_net(0).state_dict()
    assert state.keys() == expected.keys()
    assert all(type(state[name]) is torch.Tensor and torch.equal(state[name], expected[name]) for name in expected)


def saved_by_rank_0():
    import torch
    import torch.distributed as dist

    engine = engine_of(0)
    if dist.get_rank() == 0:
        held = io.BytesIO()
        torch.save(engine.module.state_dict(), held)
        return held.getvalue()
    return None


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_plain_tensors_are_loaded_at_every_stage(zero_stage):
    """And are used by the next forward, also where the last one left its parameters gathered."""
    [expected] = run_ranks(1, plain_output)
    for output, whole in run_ranks(2, loaded, zero_stage):
        assert output == pytest.approx(expected, rel=1e-6)
        assert whole


def plain_output():
    from training import batches

    return plain_net(7)(batches(1)[0]).square().mean().item()


def loaded(zero_stage):
    import torch
    from training import batches

    engine = engine_of(zero_stage)
    [tokens] = batches(1)
    engine.backward(engine(tokens).square().mean())
    state = plain_net(7).state_dict()
    block = {name.removeprefix("blocks.1."): state[name] for name in state if name.startswith("blocks.1.")}
    engine.module.blocks[1].load_state_dict(block)
    engine.module.load_state_dict(state)
    output = engine(tokens).square().mean().item()
    parts = dict(engine.module.named_parameters())
    whole = {name: part.full_tensor() if hasattr(part, "full_tensor") else part for name, part in parts.items()}
    return output, all(torch.equal(whole[name], state[name]) for name in whole)


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_below_stage_3_every_rank_is_given_the_whole_model(zero_stage):
    """Also the part of a module by itself, and from copies that forward has left gathered."""
    import torch

    expected = plain_net(0).state_dict()
    for state, part in run_ranks(2, whole_states, zero_stage):
        assert state.keys() == expected.keys()
        assert all(type(state[name]) is torch.Tensor and torch.equal(state[name], expected[name]) for name in expected)
        assert torch.equal(part["up.weight"], expected["blocks.1.up.weight"])


def whole_states(zero_stage):
    from training import batches

    engine = engine_of(zero_stage)
    engine(batches(1)[0])
    return engine.module.state_dict(), engine.module.blocks[1].state_dict()


def test_a_state_dict_that_one_rank_alone_asks_for_is_one_line():
    for message in run_ranks(2, asked_by_rank_0):
        assert message.startswith("rank 0 saves or loads while rank 1 trains; at zero stage 2 parameters are gathered")


def asked_by_rank_0():
    import torch.distributed as dist
    from dsplan.schemas.problem import Problem
    from training import batches

    engine = engine_of(2)
    [tokens] = batches(1)
    with pytest.raises(Problem) as caught:
        if dist.get_rank() == 0:
            engine.module.state_dict()
        engine(tokens)
    return str(caught.value).replace(", at step 0", "")


def test_shards_in_a_state_dict_are_told_once(tmp_path):
    """The engine's own checkpoints tell nothing."""
    assert run_ranks(2, shards_told, str(tmp_path)) == [1, 0]


def shards_told(folder):
    import contextlib

    engine = engine_of(3)
    heard = io.StringIO()
    with contextlib.redirect_stderr(heard):
        engine.save_checkpoint(folder)
        engine.save_16bit_model(folder)
        assert "shards" not in heard.getvalue()
        engine.module.state_dict()
        engine.module.state_dict()
    return heard.getvalue().count(
        "this rank's shards alone; save_checkpoint and save_16bit_model write the whole model"
    )
