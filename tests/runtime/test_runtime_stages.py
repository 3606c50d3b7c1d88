"""What FSDP2 cannot hold is named before anything is sharded."""

import pytest
import torch
from ranks import run_ranks
from torch import nn

CONFIG = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


def refused(parameter):
    from dsplan.runtime import initialize
    from dsplan.schemas.problem import Problem

    model = nn.Linear(2, 2)
    model.odd = nn.Parameter(parameter)
    with pytest.raises(Problem) as caught:
        initialize(model=model, config=CONFIG)
    return str(caught.value)


@pytest.mark.parametrize(
    ("parameter", "words"),
    [
        (torch.ones(2, dtype=torch.complex64), "parameter odd is torch.complex64"),
        (torch.ones(0, 4), "parameter odd has shape [0, 4], so no elements"),
    ],
)
def test_odd_parameters_are_named(parameter, words):
    [line] = run_ranks(1, refused, parameter)
    assert line.startswith(words)
