"""fp16 loss scaling with DeepSpeed's rules.

Source of the rules: deepspeed/runtime/fp16/loss_scaler.py, DynamicLossScaler (0.19.8). One difference, unless it is asked
for: gradients of the step at which the scale grows are divided by the scale that they were made with.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsplan.schemas.config import Fp16
from dsplan.schemas.problem import Problem

FACTOR = 2.0


@dataclass
class LossScale:
    """The scale in force, and what decides when it moves. A static one never does."""

    rules: Fp16
    halves_at_growth: bool = False
    """Whether gradients are divided by the grown scale already, as in deepspeed/runtime/zero/stage_1_and_2.py, step."""
    value: float = 1.0
    hysteresis_left: int = 0
    step: int = 0
    last_overflow_step: int = -1

    @staticmethod
    def start(rules: Fp16, *, halves_at_growth: bool = False) -> LossScale:
        value = rules.loss_scale if rules.loss_scale > 0 else 2.0**rules.initial_scale_power
        return LossScale(rules=rules, halves_at_growth=halves_at_growth, value=value, hysteresis_left=rules.hysteresis)

    @property
    def dynamic(self) -> bool:
        return self.rules.loss_scale == 0

    def update(self, overflow: bool) -> float:
        """Move on by one optimizer step, and say what the step's gradients are divided by.

        Problem where the scale cannot fall any further.
        """
        before = self.value
        if self.dynamic:
            self._move(overflow)
        return self.value if self.halves_at_growth else before

    def _move(self, overflow: bool) -> None:
        if overflow:
            self._overflowed()
        else:
            if self.rules.consecutive_hysteresis:
                self.hysteresis_left = self.rules.hysteresis
            good_steps = self.step - self.last_overflow_step - 1  # before this one
            if good_steps > 0 and good_steps % self.rules.loss_scale_window == 0:
                self.hysteresis_left = self.rules.hysteresis
                self.value *= FACTOR
        self.step += 1

    def _overflowed(self) -> None:
        if self.rules.hysteresis == 1 or self.hysteresis_left == 1:
            if self.value == self.rules.min_loss_scale:
                raise Problem(
                    f"gradients still overflow at the smallest loss scale ({self.value:g}); use bf16, a lower learning "
                    "rate, or look for inf and nan in the data"
                )
            self.value = max(self.value / FACTOR, self.rules.min_loss_scale)
        else:
            self.hysteresis_left -= 1
        self.last_overflow_step = self.step

    def state_dict(self) -> dict[str, float]:
        return {
            "value": self.value,
            "hysteresis_left": self.hysteresis_left,
            "step": self.step,
            "last_overflow_step": self.last_overflow_step,
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]
        self.hysteresis_left = int(state["hysteresis_left"])
        self.step = int(state["step"])
        self.last_overflow_step = int(state["last_overflow_step"])
