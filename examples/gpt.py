"""A GPT in the form that `dsplan estimate` and `dsplan tune` read: build_model(), sample_batch(), loss()."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    """Pre-norm transformer block. x: [batch, seq, width] -> [batch, seq, width]."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        batch, seq, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, seq, 3, self.heads, width // self.heads).unbind(2)
        mixed = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, seq, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """tokens: [batch, seq] -> logits: [batch, seq, vocab]. The head is tied to the embedding, as in GPT-2."""

    def __init__(self, layers: int, width: int, heads: int, vocab: int, positions: int):
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(self.init_weights)

    @staticmethod
    def init_weights(module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build_model(layers=12, width=768, heads=12, vocab=50257, positions=1024):
    """GPT-2 small unless told otherwise (`--set layers=6 --set width=320`)."""
    return GPT(layers, width, heads, vocab, positions)


def sample_batch(micro_batch, seq_len=None):
    return (torch.zeros(micro_batch, seq_len or 1024, dtype=torch.long),)


def loss(output, batch):
    """Next-token cross entropy in fp32."""
    (tokens,) = batch
    return F.cross_entropy(output[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())
