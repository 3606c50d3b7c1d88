"""A small model, its data, and the same training twice: by plain torch in one process, and by the engine on one rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

WIDTH, SAMPLES = 16, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """tokens [batch, 4] -> logits [batch, 4, 11]. Head tied to the embedding; a buffer in the sum; odd sizes to pad."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("offset", torch.randn(WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.offset
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batches(num_steps: int, seed: int = 1) -> list[torch.Tensor]:
    """Global batches of SAMPLES sequences; the label of a token is the token itself times 3, modulo 11."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(11, (SAMPLES, 4), generator=generator) for _ in range(num_steps)]


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), (tokens * 3 % 11).flatten())


def client_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """adamw: two groups with their own weight decay. sgd: momentum. adagrad: state from the start."""
    if kind == "adamw":
        decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
        groups = [{"params": others, "weight_decay": 0.0, "lr": 2e-2}, {"params": decayed}]
        return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)
    if kind == "adagrad":
        return torch.optim.Adagrad(model.parameters(), lr=1e-2)
    return torch.optim.SGD(model.parameters(), lr=1e-1, momentum=0.9)


def plain_losses(kind: str, num_steps: int, clip: float = 0.0) -> tuple[list[float], list[float]]:
    """(losses, gradient norms) of one process on the whole batch, fp32; the model is that of seed 0."""
    torch.manual_seed(0)
    model = Net()
    optimizer = client_optimizer(kind, model)
    losses, norms = [], []
    for tokens in batches(num_steps):
        loss = loss_of(model(tokens), tokens)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf")).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


def engine_losses(config: dict[str, Any], kind: str | None, num_steps: int) -> tuple[list[float], list[float]]:
    """The same by the engine, on this rank's share: (mean loss over ranks, norms). The model's seed is the rank."""
    from dsplan.runtime import initialize

    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = Net()
    optimizer = client_optimizer(kind, model) if kind else None
    accumulation = config.get("gradient_accumulation_steps", 1)
    micro_batch = SAMPLES // world // accumulation
    engine, held, _, _ = initialize(
        model=model, optimizer=optimizer, config={"train_micro_batch_size_per_gpu": micro_batch, **config}
    )
    assert optimizer is None or held is optimizer
    losses, norms = [], []
    for tokens in batches(num_steps):
        total = torch.zeros(())
        share = micro_batch * accumulation
        for part in tokens[rank * share : (rank + 1) * share].split(micro_batch):
            loss = loss_of(engine(part), part)
            engine.backward(loss)
            engine.step()
            total += loss.detach() / accumulation
        dist.all_reduce(total)
        losses.append(total.item() / world)
        norms.append(engine.get_global_grad_norm())
    assert engine.global_steps == num_steps and engine.skipped_steps == 0
    return losses, norms
