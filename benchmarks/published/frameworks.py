"""How families of frameworks run a model: the engine that stands for each, its kernels, its optimizer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from dsplan.schemas.plan import Engine

from .cells import Kind, Unmapped
from .networks import Style


@dataclass(frozen=True, slots=True)
class Framework:
    """pattern: of the row's framework and sharding, in lower case, with spaces for hyphens, slashes and underscores."""

    pattern: str
    engine: Engine
    style: Style
    kernel: Literal["fused", "foreach", "for-loop"]
    source: str
    recompute: Literal["none", "full"] = "none"
    """Where a row does not say."""
    expandable: bool = False
    """Its scripts ask the allocator for expandable segments."""
    shifted_loss: bool = False
    """The tables' runs are of 2023 and 2024, with the loss that Hugging Face's models had then."""
    peak_kind: Kind = "reserved"
    """What it calls peak memory, where a row says no more than that."""
    selective: bool = False
    """Its selective recompute is described in networks.py."""
    sequence_parallel: bool = False
    """With tp it always splits the sequence between the parts that tp splits."""
    chunked_loss: bool = False
    """Head and loss go over eight chunks of the sequence; embedding and head are sharded on their own."""


_HF = r"\b(hf|hugging ?face|transformers|accelerate|trl|llama ?factory|axolotl)\b"
_DEEPSPEED = r"(deep ?speed|\bzero ?[0-3]\b)"
FRAMEWORKS = (
    Framework(r"megatron.*deep ?speed|deep ?speed.*megatron", "deepspeed", "megatron", "fused", "apex FusedAdam"),
    Framework(
        rf"\bswift\b.*{_DEEPSPEED}",
        "deepspeed",
        "hf",
        "foreach",
        "its examples export expandable_segments:True",
        expandable=True,
    ),
    Framework(
        rf"^(?!deep ?speed).*{_HF}.*{_DEEPSPEED}",
        "deepspeed",
        "hf",
        "foreach",
        "transformers: torch AdamW",
        shifted_loss=True,
    ),
    Framework(_DEEPSPEED, "deepspeed", "hf", "fused", "deepspeed/runtime/engine.py: FusedAdam", shifted_loss=True),
    Framework(
        r"torch ?titan",
        "native",
        "fused",
        "fused",
        "torchtitan/components/optimizer.py; models/llama3/parallelize.py, apply_tp: SequenceParallel",
        selective=True,
        sequence_parallel=True,
    ),
    Framework(r"llm ?foundry|composer|mosaic", "native", "fused", "foreach", "torch AdamW by default"),
    Framework(
        r"torch ?tune",
        "native",
        "fused",
        "foreach",
        "its recipes checkpoint by default; torchtune/training/memory.py prints peak_memory_active and _alloc first; "
        "recipes/configs/llama3/70B_full.yaml: custom_sharded_layers and CEWithChunkedOutputLoss",
        recompute="full",
        peak_kind="allocated",
        chunked_loss=True,
    ),
    Framework(r"fsdp", "native", "hf", "foreach", "torch AdamW by default"),
    Framework(r"axolotl", "native", "hf", "foreach", "torch AdamW by default"),
    Framework(
        r"lit ?gpt|lightning|fabric|pytorch|\bpeft\b|\bddp\b", "deepspeed", "hf", "foreach", "torch AdamW by default"
    ),
    Framework(rf"{_HF}|\bswift\b", "deepspeed", "hf", "foreach", "torch AdamW by default", shifted_loss=True),
)
OWN_ENGINES = (
    "megatron", "flagscale", "nanotron", "internevo", "paddle", "unsloth", "mist", "nemo", "colossal", "alpa", "bmtrain",
    "jax", "maxtext", "mindspore", "mlx",
)  # fmt: skip
"""Frameworks whose sharding and buffers are neither DeepSpeed's nor FSDP2's."""


def framework_of(row: Mapping[str, str]) -> Framework:
    """Unmapped where it is not known, or is an engine of its own."""
    name = _plain(row["framework"])
    if not name:
        raise Unmapped("framework is not known: not said")
    text = f"{name} {_plain(row['sharding'])}"
    own = next((own for own in OWN_ENGINES if re.search(rf"\b{own}", name)), None)
    for framework in FRAMEWORKS:
        if own and framework.style != "megatron":
            raise Unmapped(f"an engine of its own: {own}")
        if re.search(framework.pattern, text):
            return framework
    raise Unmapped(f"framework is not known: {row['framework']}")


def _plain(text: str) -> str:
    return re.sub(r"[\s_/\-]+", " ", text.lower()).strip()
