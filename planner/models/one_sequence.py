"""Rows of a Hugging Face batch hold one sequence each, where the model itself counts positions: then no mask is written."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor


def one_sequence_a_row(masking: Any = None) -> None:
    """On tensors without values transformers cannot look whether rows are packed, and would write a mask of length x length
    and copy keys and values for each head. With values it finds consecutive positions, and leaves that to the kernel.

    masking: transformers.masking_utils; None: if it has been imported. Positions that the batch brings may be packed: they
    are left to transformers. Source: transformers/masking_utils.py, find_packed_sequence_indices.
    """
    masking = masking or sys.modules.get("transformers.masking_utils")
    found: Callable[[Any], Any] | None = getattr(masking, "find_packed_sequence_indices", None)
    if found is None or hasattr(found, "__wrapped__"):
        return

    @functools.wraps(found)
    def of_own_positions(position_ids: Any) -> Any:
        return None if _is_weightless(position_ids) and not _brought() else found(position_ids)

    masking.find_packed_sequence_indices = of_own_positions


def _is_weightless(tensor: Any) -> bool:
    return isinstance(tensor, FakeTensor) or tensor.is_meta


def _brought() -> bool:
    """Whether the outermost module that runs was called with positions."""
    frame = inspect.currentframe()
    outermost: Any = None
    while frame is not None:
        if frame.f_code.co_name == "_call_impl" and isinstance(frame.f_locals.get("self"), nn.Module):
            outermost = frame
        frame = frame.f_back
    return outermost is not None and outermost.f_locals.get("kwargs", {}).get("position_ids") is not None
