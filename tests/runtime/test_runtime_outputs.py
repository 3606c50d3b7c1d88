"""What a block or the model gives may be changed in place: losses are those of plain PyTorch, at every ZeRO stage."""

import pytest
from ranks import run_ranks


def test_views_that_units_give_may_be_changed_in_place():
    for plain, sharded, warned in run_ranks(2, losses):
        assert warned == []
        for zero_stage in range(4):
            assert sharded[zero_stage] == pytest.approx(plain, rel=1e-6)


def test_what_was_kept_for_backward_and_then_changed_in_place_is_still_an_error():
    assert "modified by an inplace operation" in run_ranks(1, changed_too_late)[0]


def losses():
    """(of plain PyTorch, of each stage, warnings on views): of three steps."""
    import warnings

    from torch.optim import SGD

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plain = _model()
        optimizer = SGD(plain.parameters(), lr=0.1)
        expected = []
        for x in _batches():
            loss = _loss(plain(x))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            expected.append(loss.item())
        found = []
        for zero_stage in range(4):
            engine = _engine(_model(), zero_stage)
            found.append([])
            for x in _batches():
                loss = _loss(engine(x))
                engine.backward(loss)
                engine.step()
                found[-1].append(loss.item())
    return expected, found, [str(warning.message) for warning in caught if "view" in str(warning.message)]


def changed_too_late():
    import torch
    from torch import nn

    class Relu(nn.Linear):
        def forward(self, x):
            return super().forward(x).relu().view(-1)

    engine = _engine(Relu(4, 4), 2)
    out = engine(torch.ones(2, 4))
    out += 1
    try:
        engine.backward(out.sum())
    except RuntimeError as error:
        return str(error)
    return ""


def _engine(model, zero_stage):
    from dsplan.runtime import initialize

    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": zero_stage},
    }
    return initialize(model=model, config=config)[0]


def _model():
    import torch
    from torch import nn

    class Model(nn.Module):
        """A linear layer with a bias gives a view of what it computed, on three dimensions."""

        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
            self.head = nn.Linear(8, 1)

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
                x += 0.5
            return {"out": self.head(x).squeeze(-1)}

    torch.manual_seed(0)
    return Model()


def _batches():
    import torch

    generator = torch.Generator().manual_seed(1)  # the same on every rank: what plain PyTorch sees
    return [torch.randn(4, 2, 8, generator=generator) for _ in range(3)]


def _loss(output):
    out = output["out"]
    out += 1
    return (out**2).mean()
