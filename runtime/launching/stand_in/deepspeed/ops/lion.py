"""DeepSpeed's Lion classes."""

from __future__ import annotations

from typing import Any

from dsplan.runtime.optimizing.lion import Lion


class FusedLion(Lion):
    """set_grad_none changes nothing: gradients always become None."""

    def __init__(self, params: Any, *args: Any, set_grad_none: bool = True, **options: Any):
        super().__init__(params, *args, **options)


class DeepSpeedCPULion(Lion):
    """As FusedLion; where the states live is the engine's affair."""

    def __init__(self, model_params: Any, *args: Any, fp32_optimizer_states: bool = True, **options: Any):
        if not fp32_optimizer_states:
            raise ValueError("fp32_optimizer_states false is not carried out by the native engine; leave it out")
        super().__init__(model_params, *args, **options)
