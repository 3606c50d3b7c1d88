"""The states of the random number generators of one rank, as bytes: Python's, torch's on the host and on the device, and
numpy's where the script uses it."""

from __future__ import annotations

import base64
import json
import random
import sys
from typing import Any

import torch
from dsplan.runtime.checkpoints.plain import decode, encode


def random_states(device: torch.device) -> torch.Tensor:
    """JSON as a tensor of bytes."""
    states: dict[str, Any] = {
        "python": encode(random.getstate(), "random"),
        "torch": _text(torch.get_rng_state()),
        "cuda": _text(torch.cuda.get_rng_state(device)) if device.type == "cuda" else None,
        "numpy": None,
    }
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        kind, key, *rest = numpy.random.get_state()
        states["numpy"] = [kind, key.tolist(), *rest]
    return torch.frombuffer(bytearray(json.dumps(states).encode()), dtype=torch.uint8)


def restore_random_states(held: torch.Tensor, device: torch.device) -> None:
    states = json.loads(bytes(held.tolist()))
    random.setstate(decode(states["python"]))
    torch.set_rng_state(_bytes(states["torch"]))
    if states["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(_bytes(states["cuda"]), device)
    if states["numpy"] is not None:
        import numpy

        kind, key, *rest = states["numpy"]
        numpy.random.set_state((kind, numpy.array(key, dtype=numpy.uint32), *rest))


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode()


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
