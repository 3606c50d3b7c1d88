"""from_pretrained in a model file: from the config, without weights."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def from_configs(path: Path) -> Iterator[list[str]]:
    """While the file's code runs, transformers builds models from their configs; notes gain what was met.

    Only where its text speaks of it, since transformers takes seconds to import.
    """
    notes: list[str] = []
    try:
        asked = b"from_pretrained" in path.read_bytes()
        modeling = importlib.import_module("transformers.modeling_utils") if asked else None
    except (OSError, ImportError):
        modeling = None
    if modeling is None:
        yield notes
        return
    from dsplan.planner.capturing.hugging_face import patch_transformers

    def now(name: str, act: Callable[[Any], None]) -> None:
        if name == modeling.__name__:
            act(modeling)

    before = modeling.PreTrainedModel.__dict__["from_pretrained"]
    patch_transformers(notes, now)
    try:
        yield notes
    finally:
        modeling.PreTrainedModel.from_pretrained = before
