"""What lint asks of a model and its file: the hidden size, the optimizer that the script makes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dsplan.planner.auditing.scripts import client_optimizer
from dsplan.planner.rules.models import ModelFacts

if TYPE_CHECKING:
    from dsplan.planner.models.load import Subject


def facts_of(model: str, subject: Subject) -> ModelFacts:
    """A script is not run for it: what its model has is then not known."""
    module = getattr(subject, "module", None) if subject.kind != "script" else None
    path = model.rpartition(":")[0] if ".py:" in model else model
    return ModelFacts(
        source=model,
        hidden_known=module is not None,
        hidden_size=_hidden_size(getattr(module, "config", None)),
        widest=_widest(module),
        client_optimizer=client_optimizer(path),
    )


def _hidden_size(config: Any) -> int | None:
    """As the Trainer looks for it. Source: transformers/integrations/deepspeed.py, trainer_config_finalize."""
    for holder in (config, getattr(config, "text_config", None)):
        size, sizes = getattr(holder, "hidden_size", None), getattr(holder, "hidden_sizes", None)
        if isinstance(size, int):
            return size
        if sizes:
            return int(max(sizes))
    return None


def _widest(module: Any) -> int | None:
    if module is None:
        return None
    import torch

    widths = [layer.in_features for layer in module.modules() if isinstance(layer, torch.nn.Linear)]
    return max(widths, default=None)
