"""A model with the changes that were asked for."""

from __future__ import annotations

from dsplan.planner.models.adapting import Adapting
from dsplan.planner.models.adapting_loss import change_loss
from dsplan.planner.models.adapting_weights import add_lora, freeze, quantize
from torch import nn


def adapt(source: str, module: nn.Module, adapting: Adapting) -> list[str]:
    """Change the model in place, in the order in which a training script does: load, lay adapters, freeze. Notes."""
    notes: list[str] = []
    if adapting.quantize is not None:
        notes += quantize(source, module, adapting.quantize)
        if adapting.lora is None:
            notes.append(
                f"--quantize {adapting.quantize} without --lora trains embeddings, norms and the output layer alone, which "
                "Trainer refuses; add --lora r=16,targets=all-linear"
            )
    if adapting.lora is not None:
        notes += add_lora(source, module, adapting.lora)
    if adapting.freeze:
        notes.append(freeze(source, module, adapting.freeze))
    if adapting.loss is not None:
        notes += change_loss(source, module, adapting.loss)
    return notes
