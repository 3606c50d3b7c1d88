"""Shapes of decoder models: from a row's columns, or from its model's name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder-only transformer. gated: three matrices in the feed-forward part (SwiGLU), not two (GELU)."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    gated: bool = True
    tied: bool = False
    attention_bias: bool = False

    @property
    def params(self) -> int:
        """Without norms, biases and learned positions: below 0.2 % of the models here."""
        per_head = self.hidden // self.heads
        attention = self.hidden * per_head * (2 * self.heads + 2 * self.kv_heads)
        feed_forward = (3 if self.gated else 2) * self.hidden * self.ffn
        return self.layers * (attention + feed_forward) + self.vocab * self.hidden * (1 if self.tied else 2)


def _known(text: str) -> dict[str, Architecture]:
    """name: layers hidden heads kv_heads ffn vocab [gelu] [tied] [bias]"""
    found = {}
    for line in text.strip().splitlines():
        name, rest = line.split(":")
        words = rest.split()
        layers, hidden, heads, kv_heads, ffn, vocab = map(int, words[:6])
        found[name.strip()] = Architecture(
            layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=vocab,
            gated="gelu" not in words, tied="tied" in words, attention_bias="bias" in words,
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
phi-1.5: 24 2048 32 32 8192 51200 gelu bias
stablelm-alpha-3b: 16 4096 32 32 16384 50688 gelu bias
gpt2: 12 768 12 12 3072 50257 gelu tied bias
gpt2-xl: 48 1600 25 25 6400 50257 gelu tied bias
gpt-j-6b: 28 4096 16 16 16384 50400 gelu
opt-13b: 40 5120 40 40 20480 50272 gelu tied bias
bloomz-7b1: 30 4096 32 32 16384 250880 gelu tied bias
mpt-7b: 32 4096 32 32 16384 50432 gelu tied
mpt-30b: 48 7168 64 64 28672 50432 gelu tied
""")

BIASED = ("qwen-", "qwen1", "qwen2", "chatglm", "glm-4")
"""Families whose query, key and value have biases. Source: their configs (qkv_bias, add_qkv_bias)."""
_ENDINGS = re.compile(r"[-_ ](instruct|chat|base|it|hf|sft|pretrain)$")


def named(model: str) -> Architecture | None:
    """The architecture that a name stands for; None where it is not known."""
    name = re.sub(r"\s*\(.*", "", model.split("/")[-1].strip().lower()).replace("_", ".")
    name = re.sub(r"(\d)\s+b$", r"\1b", name).strip().replace(" ", "-")
    while name != (shorter := _ENDINGS.sub("", name)):
        name = shorter
    return KNOWN.get(re.sub(r"^phi-1\.5-.*", "phi-1.5", name))


def architecture_of(row: Mapping[str, str]) -> Architecture | str:
    """The architecture of a row's columns, else of its model's name; a reason where there is none.

    Whether the feed-forward part is gated and the embedding tied is what comes closest to the row's params_b.
    """
    numbers = {name: _whole(row[name]) for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")}
    if "experts" in row["ffn"]:
        return "a mixture of experts"
    if not (numbers["layers"] and numbers["hidden"] and numbers["vocab"]):
        found = named(row["model"])
        return found if found else "architecture is not in the row, and the model's name is not known"
    hidden = numbers["hidden"]
    heads = numbers["heads"] or _usual_heads(hidden)
    if hidden % heads:
        return "heads do not divide hidden"
    name = row["model"].lower()
    plain = Architecture(
        layers=numbers["layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=numbers["kv_heads"] or heads,
        ffn=numbers["ffn"] or 4 * hidden,
        vocab=numbers["vocab"],
        attention_bias=name.startswith(BIASED),
    )
    choices = [replace(plain, gated=gated, tied=tied) for gated in (True, False) for tied in (False, True)]
    said = float(row["params_b"] or 0) * 1e9
    if not said:
        return choices[0]
    best = min(choices, key=lambda choice: abs(choice.params - said))
    if abs(best.params - said) > 0.1 * said:
        return "the columns' shapes give other parameters than params_b (more than 10 %)"
    return best


def _usual_heads(hidden: int) -> int:
    """As many as make each nearest to 128 wide, where a row does not say."""
    return min((n for n in range(1, hidden) if hidden % n == 0), key=lambda n: abs(hidden / n - 128))


def _whole(text: str) -> int:
    return int(float(text)) if re.fullmatch(r"\d+(\.0)?", text) else 0
