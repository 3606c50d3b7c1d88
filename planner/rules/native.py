"""DSP8xx: what the native engine does not carry out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dsplan.planner.rules.known_keys import title
from dsplan.planner.rules.mechanism import ERROR, Hit, rule

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@rule("DSP801", "not-native", severity=ERROR, keys=[])
def not_native(native: Mapping[str, Any]) -> Iterator[Hit]:
    """With --engine native, every key must be one that the native engine carries out.

    Why:    initialize() refuses the rest for the same reasons (error), or goes on without its effect (warning).
    Given:  engine native
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3, "zero_quantized_weights": true}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3}}
    Fix:    none
    Source: dsplan/schemas/native_support.py
    """
    from dsplan.schemas.native_support import reasons

    for pointer, severity, message in reasons(native):
        name = title(pointer)
        said = message if not name or name.rpartition(".")[2] in message else f"{name}: {message}"
        yield Hit(pointer, said, severity=severity, on_key=True)
