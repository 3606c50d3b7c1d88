"""DeepSpeed's activation checkpointing: the same numbers as without, the same random ones, and what is kept where."""

import pytest
import torch
from dsplan.runtime import checkpointing
from dsplan.runtime.recompute import apply_recompute
from dsplan.schemas.problem import Problem
from ranks import run_ranks
from torch import nn
from torch.utils import checkpoint as torch_checkpoint


@pytest.fixture(autouse=True)
def afresh():
    yield
    checkpointing._settings = None
    checkpointing.get_cuda_rng_tracker().reset()


class Counted(nn.Module):
    """x -> x + down(dropout(up(x))), counting how often it runs."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 32), nn.Linear(32, 8), nn.Dropout(0.5)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x + self.down(self.drop(self.up(x)))


def gradients(run, recompute="none"):
    """(loss, gradients, calls) of two blocks, each run by `run(block, x)`."""
    torch.manual_seed(0)
    blocks = nn.Sequential(Counted(), Counted())
    apply_recompute(blocks, recompute)
    x = torch.randn(4, 8, requires_grad=True)
    out = x
    for block in blocks:
        out = run(block, out)
    loss = out.square().sum()
    loss.backward()
    return loss, [x.grad, *(p.grad for p in blocks.parameters())], [block.calls for block in blocks]


@pytest.mark.parametrize(
    "block", [None, {}, {"cpu_checkpointing": True, "profile": True}, {"partition_activations": True}]
)
def test_checkpoints_change_no_number_also_of_dropout(block, capsys):
    if block is not None:
        checkpointing.configure(None, deepspeed_config={"activation_checkpointing": block})
    plain_loss, plain, calls = gradients(lambda block, x: block(x))
    assert calls == [1, 1]
    loss, found, calls = gradients(lambda block, x: checkpointing.checkpoint(block, x))
    assert calls == [2, 2]
    assert torch.equal(loss, plain_loss)
    assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))
    told = capsys.readouterr().err
    assert ("checkpoint: forward again" in told) == bool(block and block.get("profile"))
    assert ("partition_activations has no effect" in told) == bool(block and block.get("partition_activations"))


def test_keyword_arguments_tuples_and_inputs_without_gradients():
    weight = nn.Parameter(torch.full((2,), 3.0))

    def two(x, *, factor):
        return x * weight * factor, x + weight

    first, second = checkpointing.checkpoint(two, torch.ones(2), factor=torch.tensor(2.0))
    (first.sum() + second.sum()).backward()
    assert torch.equal(weight.grad, torch.full((2,), 3.0))  # 1 x 2 + 1


def test_states_of_the_tracker_are_the_same_when_computed_again():
    """Drawn inside fork(): the second time as the first, and drawing goes on from after the first."""
    tracker = checkpointing.get_cuda_rng_tracker()

    def drop(x):
        with tracker.fork():
            return nn.functional.dropout(x, 0.5) * x

    def run(checkpointed):
        checkpointing.model_parallel_cuda_manual_seed(7)
        x = torch.arange(1.0, 65.0, requires_grad=True)
        out = checkpointing.checkpoint(drop, x) if checkpointed else drop(x)
        out.sum().backward()
        with tracker.fork():
            return x.grad, torch.rand(3)

    plain, checked = run(False), run(True)
    assert torch.equal(plain[0], checked[0]) and torch.equal(plain[1], checked[1])
    assert torch.initial_seed() == 7


def test_a_seed_or_name_is_added_once():
    tracker = checkpointing.get_cuda_rng_tracker()
    tracker.add("mine", 3)
    with pytest.raises(Exception, match="seed 3 already exists"):
        tracker.add("other", 3)
    with pytest.raises(Exception, match="mine already exists"):
        tracker.add("mine", 4)
    with pytest.raises(Exception, match="other is not added"), tracker.fork("other"):
        pass


def test_arguments_go_before_the_file():
    assert not checkpointing.is_configured()
    config = {"activation_checkpointing": {"cpu_checkpointing": True, "number_checkpoints": 4}}
    checkpointing.configure(None, config, checkpoint_in_cpu=False)
    assert checkpointing.is_configured()
    assert checkpointing._settings == checkpointing.Settings(num_checkpoints=4)


@pytest.mark.parametrize(
    ("block", "missing"),
    [
        ({"contiguous_memory_optimization": True, "number_checkpoints": 2}, "partition_activations"),
        ({"contiguous_memory_optimization": True, "partition_activations": True}, "num_checkpoints"),
    ],
)
def test_contiguous_checkpoints_need_what_deepspeed_asserts(block, missing):
    with pytest.raises(Problem, match=f"need {missing}"):
        checkpointing.configure(None, {"activation_checkpointing": block})


def test_deepspeeds_own_function_can_be_applied():
    outputs = []
    x = torch.ones(3, requires_grad=True)
    checkpointing.CheckpointFunction.apply(lambda y: (y * 2, y * 3), outputs, x)
    (outputs[0] + outputs[1]).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 5.0))


def test_kept_inputs_wait_on_the_host(monkeypatch):
    """What torch.autograd.graph.save_on_cpu is given: the checkpoint's input, and nothing that is made inside."""
    moved = []

    class Seen(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self, pin_memory):
            assert pin_memory == torch.cuda.is_available()
            super().__init__(lambda tensor: moved.append(tensor) or tensor, lambda tensor: tensor)

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", Seen)
    checkpointing.configure(None, checkpoint_in_cpu=True)
    x = torch.randn(4, 8, requires_grad=True)
    checkpointing.checkpoint(lambda y: torch.exp(torch.sin(y)), x)
    assert [tensor.data_ptr() for tensor in moved] == [x.data_ptr()]


OWN = {
    "torch": lambda block, x: torch_checkpoint.checkpoint(block, x, use_reentrant=False),
    "torch reentrant": lambda block, x: torch_checkpoint.checkpoint(block, x, use_reentrant=True),
    "deepspeed": lambda block, x: checkpointing.checkpoint(block, x),
    "none": lambda block, x: block(x),
}


@pytest.mark.parametrize("own", OWN)
def test_what_the_model_checkpoints_itself_is_not_computed_a_third_time(own):
    plain_loss, plain, _ = gradients(lambda block, x: block(x))
    loss, found, calls = gradients(OWN[own], "full")
    assert calls == [2, 2]
    assert torch.equal(loss, plain_loss)
    assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))


def trained(stage, how):
    """Losses of three steps, with one frozen block and dropout."""
    from dsplan.runtime import initialize
    from training import Net, batches, loss_of

    torch.manual_seed(0)
    model = Net()
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad_(False)
    for block in model.blocks:
        plain = block.forward
        block.forward = lambda x, plain=plain: nn.functional.dropout(plain(x), 0.1)
    if how == "api":
        checkpointing.configure(None, deepspeed_config={"activation_checkpointing": {"cpu_checkpointing": True}})
        for block in model.blocks:
            plain = block.forward
            block.forward = lambda x, plain=plain: checkpointing.checkpoint(plain, x)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "bf16": {"enabled": True},
        "activation_checkpointing": {"cpu_checkpointing": True},
        "dsplan": {"recompute": how if how in ("full", "selective") else "none"},
    }
    engine, *_ = initialize(model=model, config=config)
    torch.manual_seed(1)
    losses = []
    for tokens in batches(3):
        loss = loss_of(engine(tokens[:4]), tokens[:4])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("stage", [0, 3])
def test_training_is_bitwise_that_without(stage):
    plain = run_ranks(2, trained, stage, "none")
    for how in ("api", "full", "selective"):
        assert run_ranks(2, trained, stage, how) == plain
