"""Shapes of decoder models: from a row's columns, or from its model's name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from .cells import decimal, whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A transformer. gated: three matrices in the feed-forward part (SwiGLU), not two (GELU)."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    gated: bool = True
    tied: bool = False
    attention_bias: bool = False
    family: str = "llama"
    """Whose class Hugging Face's runs use: a key of FAMILIES in families.py."""
    head_dim: int | None = None
    """Where it is not hidden / heads."""

    @property
    def params(self) -> int:
        """Without norms, biases and learned positions: below 0.2 % of the models here."""
        per_head = self.head_dim or self.hidden // self.heads
        attention = self.hidden * per_head * (2 * self.heads + 2 * self.kv_heads)
        feed_forward = (3 if self.gated else 2) * self.hidden * self.ffn
        return self.layers * (attention + feed_forward) + self.vocab * self.hidden * (1 if self.tied else 2)


FAMILIES = ("llama", "gpt2", "gptj", "opt", "bloom", "gpt_neox", "falcon", "phi", "phi3", "gemma", "gemma2", "bert")
"""Hugging Face's model types that networks.py builds; others stand for themselves by their shapes."""


def _known(text: str) -> dict[str, Architecture]:
    """name: layers hidden heads kv_heads ffn vocab [gelu] [tied] [bias] [head=N] [family]"""
    found = {}
    for line in text.strip().splitlines():
        name, rest = line.split(":")
        words = rest.split()
        layers, hidden, heads, kv_heads, ffn, vocab = map(int, words[:6])
        head_dim = [int(word[5:]) for word in words if word.startswith("head=")]
        family = [word for word in words[6:] if word in FAMILIES]
        found[name.strip()] = Architecture(
            layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=vocab,
            gated="gelu" not in words, tied="tied" in words, attention_bias="bias" in words,
            head_dim=head_dim[0] if head_dim else None, family=family[0] if family else "llama",
        )  # fmt: skip
    return found


# Source: the config.json that each of these models is published with.
KNOWN = _known("""
llama-7b: 32 4096 32 32 11008 32000
llama-13b: 40 5120 40 40 13824 32000
llama-2-7b: 32 4096 32 32 11008 32000
llama-2-13b: 40 5120 40 40 13824 32000
llama-2-70b: 80 8192 64 8 28672 32000
llama-3-8b: 32 4096 32 8 14336 128256
llama-3.1-8b: 32 4096 32 8 14336 128256
llama-3-70b: 80 8192 64 8 28672 128256
llama-3.1-70b: 80 8192 64 8 28672 128256
llama-3.1-405b: 126 16384 128 8 53248 128256
llama-3.2-1b: 16 2048 32 8 8192 128256 tied
llama-3.2-3b: 28 3072 24 8 8192 128256 tied
mistral-7b: 32 4096 32 8 14336 32000
yi-6b: 32 4096 32 4 11008 64000
yi-34b: 60 7168 56 8 20480 64000
baichuan2-7b: 32 4096 32 32 11008 125696
baichuan2-13b: 40 5120 40 40 13696 125696
chatglm-6b: 28 4096 32 32 16384 130528 gelu bias
chatglm2-6b: 28 4096 32 2 13696 65024 bias
chatglm3-6b: 28 4096 32 2 13696 65024 bias
glm-4-9b: 40 4096 32 2 13696 151552 bias
qwen-1.8b: 24 2048 16 16 5504 151936 bias
qwen-7b: 32 4096 32 32 11008 151936 bias
qwen-14b: 40 5120 40 40 13696 152064 bias
qwen-72b: 80 8192 64 64 24576 152064 bias
qwen2-7b: 28 3584 28 4 18944 152064 bias
qwen2.5-0.5b: 24 896 14 2 4864 151936 tied bias
qwen2.5-1.5b: 28 1536 12 2 8960 151936 tied bias
qwen2.5-3b: 36 2048 16 2 11008 151936 tied bias
qwen2.5-7b: 28 3584 28 4 18944 152064 bias
qwen2.5-14b: 48 5120 40 8 13824 152064 bias
qwen2.5-32b: 64 5120 40 8 27648 152064 bias
qwen2.5-72b: 80 8192 64 8 29568 152064 bias
qwen3-0.6b: 28 1024 16 8 3072 151936 tied
qwen3-1.7b: 28 2048 16 8 6144 151936 tied
qwen3-4b: 36 2560 32 8 9728 151936 tied
qwen3-8b: 36 4096 32 8 12288 151936
qwen3-14b: 40 5120 40 8 17408 151936
qwen3-32b: 64 5120 64 8 25600 151936
smollm2-135m: 30 576 9 3 1536 49152 tied
smollm2-360m: 32 960 15 5 2560 49152 tied
smollm2-1.7b: 24 2048 32 32 8192 49152 tied
tinyllama-1.1b: 22 2048 32 4 5632 32000
llama-30b: 60 6656 52 52 17920 32000
llama-65b: 80 8192 64 64 22016 32000
llama-3.3-70b: 80 8192 64 8 28672 128256
codellama-7b: 32 4096 32 32 11008 32016
codellama-34b: 48 8192 64 8 22016 32000
vicuna-7b: 32 4096 32 32 11008 32000
vicuna-13b: 40 5120 40 40 13824 32000
mistral-nemo-12b: 40 5120 32 8 14336 131072 head=128
mistral-small-24b: 40 5120 32 8 32768 131072 head=128
zephyr-7b: 32 4096 32 8 14336 32000
internlm2-7b: 32 4096 32 8 14336 92544
internlm2-20b: 48 6144 48 8 16384 92544
deepseek-llm-7b: 30 4096 32 32 11008 102400
qwen1.5-0.5b: 24 1024 16 16 2816 151936 tied bias
qwen1.5-1.8b: 24 2048 16 16 5504 151936 bias
qwen1.5-7b: 32 4096 32 32 11008 151936 bias
qwen1.5-14b: 40 5120 40 40 13696 152064 bias
qwen1.5-72b: 80 8192 64 64 24576 152064 bias
qwen2-0.5b: 24 896 14 2 4864 151936 tied bias
qwen2-1.5b: 28 1536 12 2 8960 151936 tied bias
qwen2-72b: 80 8192 64 8 29568 152064 bias
qwen2.5-coder-7b: 28 3584 28 4 18944 152064 bias
qwen2.5-coder-32b: 64 5120 40 8 27648 152064 bias
phi-1: 24 2048 32 32 8192 51200 gelu bias phi
phi-1.5: 24 2048 32 32 8192 51200 gelu bias phi
phi-2: 32 2560 32 32 10240 51200 gelu bias phi
phi-3-mini: 32 3072 32 32 8192 32064 phi3
phi-3.5-mini: 32 3072 32 32 8192 32064 phi3
phi-3-medium: 40 5120 40 10 17920 32064 phi3
phi-4: 40 5120 40 10 17920 100352 phi3
gemma-2b: 18 2048 8 1 16384 256000 tied head=256 gemma
gemma-7b: 28 3072 16 16 24576 256000 tied head=256 gemma
gemma-2-2b: 26 2304 8 4 9216 256000 tied head=256 gemma2
gemma-2-9b: 42 3584 16 8 14336 256000 tied head=256 gemma2
gemma-2-27b: 46 4608 32 16 36864 256000 tied head=128 gemma2
stablelm-alpha-3b: 16 4096 32 32 16384 50688 gelu bias gpt_neox
gpt-neox-20b: 44 6144 64 64 24576 50432 gelu bias gpt_neox
pythia-70m: 6 512 8 8 2048 50304 gelu bias gpt_neox
pythia-160m: 12 768 12 12 3072 50304 gelu bias gpt_neox
pythia-410m: 24 1024 16 16 4096 50304 gelu bias gpt_neox
pythia-1b: 16 2048 8 8 8192 50304 gelu bias gpt_neox
pythia-1.4b: 24 2048 16 16 8192 50304 gelu bias gpt_neox
pythia-2.8b: 32 2560 32 32 10240 50304 gelu bias gpt_neox
pythia-6.9b: 32 4096 32 32 16384 50432 gelu bias gpt_neox
pythia-12b: 36 5120 40 40 20480 50688 gelu bias gpt_neox
gpt2: 12 768 12 12 3072 50257 gelu tied bias gpt2
gpt2-medium: 24 1024 16 16 4096 50257 gelu tied bias gpt2
gpt2-large: 36 1280 20 20 5120 50257 gelu tied bias gpt2
gpt2-xl: 48 1600 25 25 6400 50257 gelu tied bias gpt2
gpt-j-6b: 28 4096 16 16 16384 50400 gelu gptj
falcon-7b: 32 4544 71 1 18176 65024 gelu tied falcon
falcon-40b: 60 8192 128 8 32768 65024 gelu tied falcon
opt-125m: 12 768 12 12 3072 50272 gelu tied bias opt
opt-1.3b: 24 2048 32 32 8192 50272 gelu tied bias opt
opt-2.7b: 32 2560 32 32 10240 50272 gelu tied bias opt
opt-6.7b: 32 4096 32 32 16384 50272 gelu tied bias opt
opt-13b: 40 5120 40 40 20480 50272 gelu tied bias opt
opt-30b: 48 7168 56 56 28672 50272 gelu tied bias opt
opt-66b: 64 9216 72 72 36864 50272 gelu tied bias opt
bloom-560m: 24 1024 16 16 4096 250880 gelu tied bias bloom
bloom-1b1: 24 1536 16 16 6144 250880 gelu tied bias bloom
bloom-1b7: 24 2048 16 16 8192 250880 gelu tied bias bloom
bloom-3b: 30 2560 32 32 10240 250880 gelu tied bias bloom
bloom-7b1: 30 4096 32 32 16384 250880 gelu tied bias bloom
bloom-176b: 70 14336 112 112 57344 250880 gelu tied bias bloom
mpt-7b: 32 4096 32 32 16384 50432 gelu tied
mpt-30b: 48 7168 64 64 28672 50432 gelu tied
bert-base: 12 768 12 12 3072 30522 gelu tied bias bert
bert-large: 24 1024 16 16 4096 30522 gelu tied bias bert
""")

BIASED = ("qwen-", "qwen1", "qwen2", "chatglm", "glm-4")
"""Families whose query, key and value have biases. Source: their configs (qkv_bias, add_qkv_bias)."""
BEGINNINGS = (
    ("gpt2", "gpt2"), ("gpt-2", "gpt2"), ("gpt-j", "gptj"), ("opt-", "opt"), ("bloom", "bloom"), ("gpt-neox", "gpt_neox"),
    ("pythia", "gpt_neox"), ("stablelm-alpha", "gpt_neox"), ("falcon", "falcon"), ("phi-1", "phi"), ("phi-2", "phi"),
    ("phi-3", "phi3"), ("phi-4", "phi3"), ("gemma-2-", "gemma2"), ("gemma2", "gemma2"), ("gemma-", "gemma"), ("bert", "bert"),
)  # fmt: skip
"""Whose class a model has by its name, where its shapes are in the row."""
BEYOND = (
    (r"^(t5|mt5|flan-t5|bart|ul2)\b", "an encoder and a decoder: the length of the targets is not said"),
    (r"^(vit|deit|swin|clip|resnet|convnext)\b", "a vision model: the schema has no size of images"),
    (r"mixtral|moe|deepseek-?v[23]|gpt-oss|-a\d+b\b|grok|dbrx", "a mixture of experts"),
)
_ENDINGS = re.compile(
    r"[-. ](instruct|chat|base|it|hf|sft|pretrain|pt|v\d+(\.\d+)?|beta|alpha|4k|8k|128k|1t|fp16|bf16|uncased|cased|deduped|preview|\d{4})$"
)
_OTHER_NAMES = (
    (r"^meta-llama-", "llama-"), (r"^qwen1half", "qwen1.5"), (r"^llama(\d)", r"llama-\1"), (r"^llama-(\d)(?=\d-\d)", r"llama-\1."),
    (r"^llama-1-", "llama-"), (r"^bloomz", "bloom"), (r"^bloom$", "bloom-176b"), (r"^gpt-?neox$", "gpt-neox-20b"),
    (r"^gptj", "gpt-j"), (r"^gpt-j$", "gpt-j-6b"), (r"^gpt-2", "gpt2"), (r"^gpt2-1\.5b$", "gpt2-xl"), (r"^qwen-?(\d)-", r"qwen\1-"),
    (r"^qwen-(\d)\.5", r"qwen\1.5"), (r"^gemma2", "gemma-2"), (r"^phi(\d)", r"phi-\1"), (r"^phi-(\d)-mini-.*", r"phi-\1-mini"),
    (r"^phi-3-14b", "phi-3-medium"), (r"^phi-3-3\.8b", "phi-3-mini"), (r"^phi-1\.5-.*", "phi-1.5"), (r"^phi-2-.*", "phi-2"),
    (r"^phi-4-14b", "phi-4"), (r"^smollm-", "smollm2-"), (r"^openbuddy-zephyr", "zephyr"), (r"^mistral-nemo$", "mistral-nemo-12b"),
)  # fmt: skip


def plain_name(model: str) -> str:
    """A model's name without its owner, its flavour and its spelling: Meta-Llama-3.1-8B-Instruct is llama-3.1-8b."""
    name = re.sub(r"^[^/]+/(?=[a-z])", "", re.sub(r"\s*\(.*", "", model.strip().lower()))
    name = re.sub(r"[\s_/]+", "-", re.sub(r"(?<=\d)_(?=\d)", ".", name))
    name = re.sub(r"(?<=\d)-(?=[bm]$)", "", re.sub(r"(?<=\d)-(?=[bm]-)", "", name))
    while name != (shorter := _ENDINGS.sub("", name)):
        name = shorter
    for pattern, usual in _OTHER_NAMES:
        name = re.sub(pattern, usual, name)
    return name


def named(model: str) -> Architecture | None:
    """The architecture that a name stands for; None where it is not known."""
    return KNOWN.get(plain_name(model))


def architecture_of(row: Mapping[str, str]) -> Architecture | str:
    """The architecture of a row's columns, else of its model's name; a reason where there is none.

    Whether the feed-forward part is gated and the embedding tied is what comes closest to the row's params_b.
    """
    numbers = {name: whole(row[name]) or 0 for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")}
    name = plain_name(row["model"])
    for pattern, reason in BEYOND:
        if re.search(pattern, name):
            return reason
    if "experts" in row["ffn"]:
        return "a mixture of experts"
    found = KNOWN.get(name)
    if not (numbers["layers"] and numbers["hidden"] and numbers["vocab"]):
        return found or "architecture is not in the row, and the model's name is not known"
    hidden = numbers["hidden"]
    heads = numbers["heads"] or (found.heads if found and found.hidden == hidden else _usual_heads(hidden))
    if hidden % heads and not (found and found.head_dim):
        return "heads do not divide hidden"
    if heads % (numbers["kv_heads"] or heads):
        return "kv_heads do not divide heads"
    plain = Architecture(
        layers=numbers["layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=numbers["kv_heads"] or (found.kv_heads if found and found.heads == heads else heads),
        ffn=numbers["ffn"] or (found.ffn if found and found.hidden == hidden else 4 * hidden),
        vocab=numbers["vocab"],
        attention_bias=name.startswith(BIASED) or bool(found and found.attention_bias),
        family=next((family for beginning, family in BEGINNINGS if name.startswith(beginning)), "llama"),
        head_dim=found.head_dim if found and found.hidden == hidden else None,
    )
    choices = [replace(plain, gated=gated, tied=tied) for gated in (True, False) for tied in (False, True)]
    said = (decimal(row["params_b"]) or 0) * 1e9
    if not said:
        return replace(plain, gated=found.gated, tied=found.tied) if found else choices[0]
    best = min(choices, key=lambda choice: abs(choice.params - said))
    if abs(best.params - said) > 0.1 * said:
        return "the columns' shapes give other parameters than params_b (more than 10 %)"
    return best


def _usual_heads(hidden: int) -> int:
    """As many as make each nearest to 128 wide, where a row does not say."""
    return min((n for n in range(1, hidden) if hidden % n == 0), key=lambda n: abs(hidden / n - 128))
