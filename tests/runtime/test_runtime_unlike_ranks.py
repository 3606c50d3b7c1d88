"""Parameters that one rank, or none, has used in a step: DeepSpeed gives them gradients of zeros, and so does the engine."""

import pytest
from ranks import run_ranks


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_what_one_rank_has_used_is_averaged_with_zeros_of_the_other(zero_stage):
    for worst in run_ranks(2, experts_by_rank, zero_stage):
        assert worst < 1e-7  # the order of sums


def experts_by_rank(zero_stage):
    import copy

    import torch
    import torch.distributed as dist
    from dsplan.runtime import initialize, zero
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))  # nobody uses the third

        def forward(self, x, chosen):
            return x + self.experts[chosen](x)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.extra = nn.Linear(8, 8)

        def forward(self, x, chosen):
            for block in self.blocks:
                x = block(x, chosen)
            return self.extra(x) if chosen else x

    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    adamw = {"lr": 1e-2, "weight_decay": 0.5}
    engine, _, _, _ = initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 4,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": zero_stage},
            "optimizer": {"type": "AdamW", "params": adamw},
        },
    )
    optimizer = torch.optim.AdamW(plain.parameters(), **adamw)
    for _ in range(3):
        x = torch.randn(4, 8)
        engine.backward(engine(x, dist.get_rank()).square().mean())
        engine.step()
        sum(plain(x, rank).square().mean() / 2 for rank in range(2)).backward()
        for parameter in plain.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    with zero.GatheredParameters(list(engine.module.parameters())):
        pairs = zip(engine.module.parameters(), plain.parameters(), strict=True)
        return max((ours - theirs).abs().max().item() for ours, theirs in pairs)
