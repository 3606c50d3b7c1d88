"""DeepSpeed's Lamb class."""

from __future__ import annotations

from typing import Any

from dsplan.runtime.optimizing.lamb import Lamb


class FusedLamb(Lamb):
    """max_grad_norm must stay 0: gradient_clipping of the config clips."""

    def __init__(self, params: Any, *args: Any, max_grad_norm: float = 0.0, **options: Any):
        if max_grad_norm:
            raise ValueError(
                "max_grad_norm is not carried out by the native engine; use the config's gradient_clipping"
            )
        super().__init__(params, *args, **options)
