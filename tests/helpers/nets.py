"""Small models of many kinds, to be trained for real: each with its batch, and its loss where it computes none itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from dsplan.planner.models.load import ModelSubject
from torch import nn

VOCAB = 512


@dataclass(frozen=True)
class Net:
    build: Callable[[], nn.Module]
    batch: Callable[[int, int | None], Any]
    """(micro_batch, seq_len) -> what the model is fed."""
    loss: Callable[[Any, Any], torch.Tensor] | None = None
    seq_len: int = 16


def subject(name: str) -> ModelSubject:
    """The net as the tracer and the rehearsal take it, on device meta."""
    net = NETS[name]
    with torch.device("meta"):
        module = net.build()
    return ModelSubject(source=name, kind="file", module=module, sample_batch=net.batch, loss=net.loss)


def _tokens(micro_batch: int, seq_len: int | None) -> torch.Tensor:
    return torch.randint(VOCAB, (micro_batch, seq_len or 16))


def _labelled(micro_batch: int, seq_len: int | None) -> dict[str, torch.Tensor]:
    tokens = _tokens(micro_batch, seq_len)
    return {"input_ids": tokens, "labels": tokens}


def _cross_entropy(output: Any, batch: Any) -> torch.Tensor:
    logits = output.logits if hasattr(output, "logits") else output
    labels = batch[0] if isinstance(batch, tuple) else batch["input_ids"]
    return F.cross_entropy(logits.float().flatten(0, -2), labels.flatten())


def _hf(kind: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        made = getattr(transformers, config)(attn_implementation="eager", use_cache=False, **options)
        return getattr(transformers, kind)(made)

    return build


WIDTH, LAYERS = 128, 3
_LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


class Conv(nn.Module):
    """A small ResNet: stages of residual blocks with batch norms, of growing width. x: [batch, 3, 32, 32]."""

    class Block(nn.Module):
        def __init__(self, inner: int, outer: int, stride: int):
            super().__init__()
            self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
            self.bn1 = nn.BatchNorm2d(outer)
            self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
            self.bn2 = nn.BatchNorm2d(outer)
            same = inner == outer and stride == 1
            self.shortcut = None if same else nn.Conv2d(inner, outer, 1, stride, bias=False)

        def forward(self, x):
            out = F.relu(self.bn1(self.conv1(x)))
            out = self.bn2(self.conv2(out))
            return F.relu(out + (x if self.shortcut is None else self.shortcut(x)))

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(32)
        widths = [(32, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
        self.blocks = nn.Sequential(*(self.Block(*width) for width in widths))
        self.head = nn.Linear(128, 10)

    def forward(self, x):
        x = self.blocks(F.relu(self.bn(self.stem(x))))
        return self.head(x.mean((2, 3)))


class Mlp(nn.Module):
    """No blocks at all: two layers of different widths."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(256, 768)
        self.leave = nn.Linear(768, 10)

    def forward(self, x):
        return self.leave(torch.relu(self.enter(x)))


class Untied(nn.Module):
    """A stack of pre-norm MLP blocks between an embedding and a head of its own, with a gate that is used twice."""

    class Block(nn.Module):
        def __init__(self, width: int):
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.up = nn.Linear(width, 3 * width)
            self.down = nn.Linear(3 * width, width)

        def forward(self, x):
            return x + self.down(F.silu(self.up(self.norm(x))))

    def __init__(self, layers: int = 4, width: int = 160):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(self.Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Tied(Untied):
    def __init__(self):
        super().__init__()
        self.head.weight = self.embed.weight


class Adapted(nn.Module):
    """y = W x + B A x, with W frozen, as LoRA has it."""

    def __init__(self, linear: nn.Linear, rank: int = 8):
        super().__init__()
        self.base = linear.requires_grad_(False)
        self.low = nn.Linear(linear.in_features, rank, bias=False)
        self.high = nn.Linear(rank, linear.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.high(self.low(x))


def lora() -> nn.Module:
    model = Untied().requires_grad_(False)
    for layer in model.layers:
        layer.up, layer.down = Adapted(layer.up), Adapted(layer.down)
    return model


def _images(side: int) -> Callable[[int, int | None], tuple[torch.Tensor]]:
    return lambda micro_batch, seq_len: (torch.randn(micro_batch, 3, side, side),)


def _mean_square(output: Any, batch: Any) -> torch.Tensor:
    return output.float().square().mean()


def _vit_loss(output: Any, batch: Any) -> torch.Tensor:
    logits: torch.Tensor = output.logits
    return logits.float().square().mean()


NETS: dict[str, Net] = {
    "llama": Net(_hf("LlamaForCausalLM", "LlamaConfig", **_LLAMA), _labelled),
    "llama, loss outside": Net(
        _hf("LlamaForCausalLM", "LlamaConfig", **_LLAMA), lambda m, s: (_tokens(m, s),), _cross_entropy
    ),
    "gpt2": Net(
        _hf(
            "GPT2LMHeadModel",
            "GPT2Config",
            vocab_size=VOCAB,
            n_embd=WIDTH,
            n_layer=LAYERS,
            n_head=4,
            n_positions=64,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        ),
        _labelled,
    ),
    "bert": Net(
        _hf(
            "BertForMaskedLM",
            "BertConfig",
            vocab_size=VOCAB,
            hidden_size=WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            intermediate_size=4 * WIDTH,
            max_position_embeddings=64,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        ),
        _labelled,
    ),
    "t5": Net(
        _hf(
            "T5ForConditionalGeneration",
            "T5Config",
            vocab_size=VOCAB,
            d_model=WIDTH,
            d_kv=32,
            d_ff=2 * WIDTH,
            num_layers=LAYERS,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        ),
        _labelled,
    ),
    "vit": Net(
        _hf(
            "ViTForImageClassification",
            "ViTConfig",
            hidden_size=WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            intermediate_size=4 * WIDTH,
            image_size=32,
            patch_size=8,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        ),
        lambda m, s: {"pixel_values": torch.randn(m, 3, 32, 32)},
        _vit_loss,
    ),
    "mixtral": Net(
        _hf(
            "MixtralForCausalLM",
            "MixtralConfig",
            **_LLAMA,
            num_local_experts=4,
            num_experts_per_tok=2,
            experts_implementation="grouped_mm",
        ),
        _labelled,
    ),
    "conv": Net(Conv, _images(32), _mean_square),
    "lora": Net(lora, lambda m, s: (_tokens(m, s),), _cross_entropy),
    "untied": Net(Untied, lambda m, s: (_tokens(m, s),), _cross_entropy),
    "tied": Net(Tied, lambda m, s: (_tokens(m, s),), _cross_entropy),
    "no blocks": Net(Mlp, lambda m, s: (torch.randn(m, 256),), _mean_square),
}
