"""DeepSpeed's Adam classes, by torch's fused kernel."""

from __future__ import annotations

from typing import Any

from dsplan.runtime.optimizing import adam


class FusedAdam(adam.FusedAdam):
    """AdamW, or Adam with adam_w_mode false."""

    def __init__(self, params: Any, *args: Any, set_grad_none: bool = True, **options: Any):
        super().__init__(params, *args, **options)


class DeepSpeedCPUAdam(FusedAdam):
    """As FusedAdam; where the states live is the engine's affair."""

    def __init__(
        self, model_params: Any, *args: Any, adamw_mode: bool = True, fp32_optimizer_states: bool = True, **options: Any
    ):
        if not fp32_optimizer_states:
            raise ValueError("fp32_optimizer_states false is not carried out by the native engine; leave it out")
        super().__init__(model_params, *args, adam_w_mode=adamw_mode, **options)
