"""How long a sequence may be: the model's table of positions."""

from __future__ import annotations

import re
from typing import Any

from dsplan.planner.models.load import ModelSubject, Subject

_NAMED_BY_POSITION = re.compile(
    r"(^|[._])(wpe|pos|position|positions|pos_emb\w*|position_emb\w*|positional\w*)([._]|$)"
)


def position_table(subject: Subject) -> tuple[int, str] | None:
    """(the longest sequence, what says so); None where nothing limits it, or nothing is known.

    A Hugging Face config says it by a key, also where positions are rotary: the model was made for no more. Elsewhere it is
    an embedding whose name speaks of positions.
    """
    if not isinstance(subject, ModelSubject):
        return None
    config = getattr(subject.module, "config", None)
    if subject.kind == "hf" and config is not None:
        return _of_config(config)
    from torch import nn

    for name, module in subject.module.named_modules():
        if isinstance(module, nn.Embedding) and _NAMED_BY_POSITION.search(name.lower()):
            return module.num_embeddings, f"{name} has {module.num_embeddings} positions"
    return None


def _of_config(config: Any) -> tuple[int, str] | None:
    from dsplan.planner.models.hf import POSITIONS

    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name in POSITIONS:
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            padded = 2 if "roberta" in str(getattr(text, "model_type", "")) else 0
            return value - padded, f"{name} of the config is {value}"
    return None
