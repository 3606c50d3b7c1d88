"""Tiny nets that carry their own hand-computed answers. fp32, 4 bytes an element."""

import torch
from dsplan.planner.models.load import ModelSubject
from torch import nn

WIDTH, INNER, FED, CLASSES, LAYERS = 32, 64, 16, 4, 3


class Block(nn.Module):
    """x + down(relu(up(x))). x: [batch, WIDTH]."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Residual(nn.Module):
    """Three equal blocks between two linears; the output is its own loss."""

    block_params = WIDTH * INNER + INNER + INNER * WIDTH + WIDTH
    root_params = FED * WIDTH + WIDTH + WIDTH * CLASSES + CLASSES
    block_macs = 2 * WIDTH * INNER
    """Per sample."""
    root_macs = FED * WIDTH + WIDTH * CLASSES
    saved_per_block = 4 * (INNER + WIDTH)
    """Bytes per sample: relu's output, and the block's (the next one's input). Biases and sums need nothing."""
    peak_in_block = 4 * (INNER + WIDTH + WIDTH)
    """At the sum: relu's output, down's and the sum itself."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(FED, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.leave = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x).mean()


class Tied(nn.Module):
    """Embedding and head share their matrix of 1000 x 64; four linears of 64 x 64 between them."""

    params = 64_000 + 4 * (64 * 64 + 64)

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(1000, 64)
        self.mid = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.head = nn.Linear(64, 1000, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids):
        h = self.emb(ids)
        for linear in self.mid:
            h = linear(h)
        return self.head(h)


def subject(make, sample_batch=None, loss=None):
    """A model class as the tracer takes it, on device meta."""
    with torch.device("meta"):
        module = make()
    return ModelSubject(source=make.__name__, kind="file", module=module, sample_batch=sample_batch, loss=loss)


def residual():
    return subject(Residual, lambda micro_batch, seq_len: (torch.zeros(micro_batch, FED),))


def tied(length=5):
    return subject(Tied, lambda micro_batch, seq_len: (torch.zeros(micro_batch, length, dtype=torch.long),))
