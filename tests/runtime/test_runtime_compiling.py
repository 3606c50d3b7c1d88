"""torch.compile by block: the same losses, the same names, and one line where it fails. Backends that need no C++ compiler."""

import pytest
import torch
from dsplan.runtime.compiling import compile_blocks
from dsplan.schemas.problem import Problem
from ranks import run_ranks
from torch import nn
from training import Net

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
"""Dynamo looks at it."""


def trained(stage, how):
    """(losses of three steps and of one evaluation, names of parameters, graphs compiled)."""
    from dsplan.runtime import initialize
    from training import batches, loss_of

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    own = {"compile": {"backend": "aot_eager"}} if how == "key" else {}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "bf16": {"enabled": stage == 2},
        "dsplan": {"recompute": "full" if stage == 3 else "none", **own},
    }
    engine, *_ = initialize(model=Net(), config=config)
    if how == "call":
        engine.compile(backend="aot_eager", compile_kwargs={"dynamic": False})
        engine.compile()  # once is enough
    assert engine.is_compiled == (how != "none")
    losses = []
    for tokens in batches(3):
        for part in tokens[:4].split(2):
            loss = loss_of(engine(part), part)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    engine.eval()
    with torch.no_grad():
        losses.append(loss_of(engine(tokens[:2]), tokens[:2]).item())
    names = [name for name, _ in engine.module.named_parameters()]
    return losses, names, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(("stage", "how"), [(0, "key"), (1, "call"), (2, "key"), (3, "key")])
def test_blocks_are_compiled_and_train_as_before(stage, how):
    """Each block is one graph, or the three share theirs. bf16 at stage 2, recompute at stage 3."""
    plain, names, graphs = run_ranks(2, trained, stage, "none")[0]
    assert graphs == 0
    losses, kept, graphs = run_ranks(2, trained, stage, how)[0]
    assert graphs >= 1
    assert kept == names
    assert losses == pytest.approx(plain, rel=5e-3 if stage == 2 else 1e-6)


def broken(graph, inputs):
    raise RuntimeError("no compiler here\nand more of it")


def test_a_compiler_that_fails_is_one_line_that_says_how_to_do_without():
    model = Net()
    assert compile_blocks(model, {"backend": broken}) == 3
    with pytest.raises(
        Problem, match=r"^torch.compile fails at blocks.0, .*no compiler here\); train without it by leaving"
    ):
        model(torch.zeros(2, 4, dtype=torch.long))


def test_an_unknown_backend_is_one_line():
    with pytest.raises(Problem, match="^torch.compile fails at .*nonesuch"):
        compile_blocks(Net(), {"backend": "nonesuch"})


def test_a_model_without_blocks_is_compiled_whole():
    model = nn.Linear(2, 3)
    assert compile_blocks(model, {"backend": "eager"}) == 1
    assert model(torch.zeros(1, 2)).shape == (1, 3)
    assert list(model.state_dict()) == ["weight", "bias"]
