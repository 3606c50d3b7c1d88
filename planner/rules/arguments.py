"""DSP0xx, continued: the configuration beside the arguments of the HF Trainer or Accelerate."""

from __future__ import annotations

from collections.abc import Iterator

from dsplan.planner.rules.known_keys import title
from dsplan.planner.rules.mechanism import ERROR, Hit, replaced, rule
from dsplan.planner.rules.precision import on
from dsplan.schemas.companion import Companion
from dsplan.schemas.positions import Document


@rule("DSP020", "unlike-training-arguments", severity=ERROR, keys=["/train_micro_batch_size_per_gpu", "/fp16/enabled"])
def unlike_training_arguments(document: Document, companion: Companion, hf_reader: str) -> Iterator[Hit]:
    """A value that the HF Trainer fills must equal its training argument, or be "auto".

    Why:    The Trainer compares the two and raises a ValueError with all that differ.
    Given:  reader trainer, args.micro_batch 4
    Bad:    {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 2, "gradient_clipping": "auto"}
    Good:   {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto"}
    Fix:    unsafe
    Source: transformers/integrations/deepspeed.py, fill_match
    """
    wanted: dict[str, int | float | None] = {
        "/train_micro_batch_size_per_gpu": companion.micro_batch,
        "/gradient_accumulation_steps": companion.accumulation,
        "/gradient_clipping": companion.gradient_clipping,
    }
    for pointer, value in wanted.items():
        written = document.at(pointer)
        if value is None or written in (None, "auto") or isinstance(written, bool) or written == value:
            continue
        yield _unlike(document, pointer, str(value))
    precision = companion.precision or ("fp32" if companion.kind == "trainer" else None)
    for name in ("fp16", "bf16"):
        pointer = f"/{name}/enabled"
        if precision and document.at(pointer) not in (None, "auto") and on(document, pointer) != (precision == name):
            yield _unlike(document, pointer, "true" if precision == name else "false")


def _unlike(document: Document, pointer: str, value: str) -> Hit:
    return Hit(
        pointer,
        f"{title(pointer)} is {document.raw(pointer)}, but the training arguments say {value}",
        remedy='write "auto"',
        fix=replaced(document.values_at[pointer], '"auto"', safe=False),
    )
