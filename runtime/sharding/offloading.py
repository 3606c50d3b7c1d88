"""Masters, gradients and optimizer state on the host: FSDP2's CPUOffloadPolicy, unit by unit.

FSDP2 moves the shards to the host as they are cut, takes each unit's to the device when it is gathered, and brings reduced
gradients back: there is one copy of every master, the parameter itself, so that whatever reads or writes parameters finds it.
It offers no offload of the optimizer alone: with that, the shards lie on the host too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from dsplan.schemas.offloading import Offloading, on_host
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy


def policies(offloading: Offloading, units: Sequence[nn.Module], device: torch.device) -> list[OffloadPolicy]:
    """One for each unit, in order: the first ones go to the host, until they hold the share that is asked for.

    Memory is pinned only where there is a device to copy to.
    """
    if offloading.what == "none":
        return [OffloadPolicy() for _ in units]
    pin = offloading.pin_memory and device.type != "cpu"
    return [
        CPUOffloadPolicy(pin_memory=pin) if goes else OffloadPolicy()
        for goes in on_host(_own_sizes(units), offloading.ratio)
    ]


def _own_sizes(units: Sequence[nn.Module]) -> list[int]:
    """Parameters that each unit holds and none before it."""
    seen: set[nn.Parameter] = set()
    sizes = []
    for unit in units:
        own = [parameter for parameter in unit.parameters() if parameter not in seen]
        seen.update(own)
        sizes.append(sum(parameter.numel() for parameter in own))
    return sizes
