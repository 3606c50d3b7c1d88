"""What engine.backward takes: one finite number that depends on the model. Anything else is one line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from dsplan.runtime.sharding.agreement import values_of_ranks
from dsplan.schemas.problem import Problem

NO_OPTIMIZER = "the engine has no optimizer; name one in the config's optimizer block or pass one to initialize"
WITHOUT_MEANING = {"allreduce_gradients": True, "release_loss": None}
"""Arguments of older releases' backward, and the value that asks for what happens anyway (None: any)."""


def refuse_loss(loss: Any, options: Mapping[str, Any]) -> None:
    """Problem where backward cannot begin from this loss, or was given an option that it does not have."""
    for name, value in options.items():
        if name not in WITHOUT_MEANING or WITHOUT_MEANING[name] not in (None, value):
            raise Problem(
                f"engine.backward does not take {name}={value!r}; it takes the loss, retain_graph and scale_wrt_gas"
            )
    rank = dist.get_rank()
    if not isinstance(loss, torch.Tensor):
        raise Problem(
            f"rank {rank}: backward needs one number as loss, a tensor, but got {type(loss).__name__}; pass what engine(inputs) "
            "gives, or a loss of it"
        )
    if loss.numel() != 1:
        raise Problem(
            f"rank {rank}: backward needs one number as loss, but got shape {list(loss.shape)}; take the mean or the sum"
        )
    if not loss.requires_grad:
        raise Problem(
            f"rank {rank}: backward needs a loss that depends on the model's parameters, but this one has no graph; compute "
            "it from engine(inputs) outside of torch.no_grad(), without .detach() or .item()"
        )


def refuse_nan_loss(loss: torch.Tensor, step: int) -> None:
    """Problem on every rank where the loss is not finite on one. Collective."""
    values = values_of_ranks(loss.detach().item())
    bad = [(rank, value) for rank, value in enumerate(values) if not math.isfinite(value)]
    if bad:
        where = ", ".join(f"{value:g} on rank {rank}" for rank, value in bad)
        raise Problem(
            f"step {step}: the loss is {where}, and dsplan.stop_on_nan_loss is true; look at that batch, or lower the "
            "learning rate"
        )
