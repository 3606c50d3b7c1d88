"""DSP07x and DSP08x: what a template leaves open, and what another reader than the file's would refuse."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dsplan.planner.rules.known_keys import members, title
from dsplan.planner.rules.mechanism import INFO, WARNING, Hit, rule
from dsplan.schemas.config import AUTO

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dsplan.schemas.positions import Document, SyntaxProblem

MOST_NAMED = 100
"""Placeholders that one message names."""


@rule("DSP070", "open-placeholders", severity=INFO, keys=[])
def open_placeholders(document: Document, open_values: Mapping[str, str]) -> Iterator[Hit]:
    """Placeholders of a template, and names of a program, are values that lint does not know.

    Why:    Lint reports what holds whatever their values are, and nothing that depends on them.
    Bad:    {"train_batch_size": ${BATCH}, "gradient_clipping": 1.0}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0}
    Fix:    none
    Source: github.com/a8m/envsubst; jinja.palletsprojects.com (the forms of placeholders that are known)
    """
    named = [f"{name} (of {title(pointer) or 'the whole file'})" for name, pointer in open_values.items()]
    first, one = next(iter(open_values)), len(named) == 1
    word = f"{first}=VALUE" if re.fullmatch(r"[\w.]+", first) else f"'{first}=VALUE'"
    fills = f"--define {word} fills {'it' if one else 'one'}"
    whole = isinstance(document.at(open_values[first]), dict)  # members of a block that nobody can name
    more = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
    yield Hit(
        open_values[first],
        f"{', '.join(named[:MOST_NAMED])}{more} {'is' if one else 'are'} not known here; what depends on "
        f"{'it' if one else 'them'} is not linted",
        remedy="" if whole else fills,
    )


@rule("DSP071", "broken-branch", severity=WARNING, keys=[])
def broken_branch(document: Document, broken_branch: SyntaxProblem) -> Iterator[Hit]:
    """A template should be readable whichever branch of its {% if %} is taken.

    Why:    Lint takes each branch once, all conditions true and then all false. What it cannot read then, the reader cannot
            either, unless the conditions are never so together. The branches that can be read are linted.
    Bad:    {"train_batch_size": 8{% if clip %}, "gradient_clipping": 1.0}{% endif %}
    Good:   {"train_batch_size": 8, {% if clip %}"gradient_clipping": 1.0{% else %}"gradient_clipping": 2.0{% endif %}}
    Fix:    none
    Source: jinja.palletsprojects.com, template designer documentation
    """
    yield Hit(
        "",
        f"with other branches of its {{% if %}} the template cannot be read ({broken_branch.message})",
        span=broken_branch.span,
    )


@rule("DSP080", "hjson-only", severity=INFO, keys=[])
def hjson_only(document: Document, elsewhere: SyntaxProblem) -> Iterator[Hit]:
    """HF Trainer and Accelerate read strict JSON: no comments, no trailing commas, no words without quotes.

    Why:    DeepSpeed reads hjson, so the same file works in a plain DeepSpeed script and fails under them. Said where
            nobody named the reader.
    Given:  reader auto
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0,}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0}
    Fix:    none
    Source: deepspeed/runtime/config.py, DeepSpeedConfig (hjson.load); transformers/integrations/deepspeed.py, HfDeepSpeedConfig (json.load)
    """
    yield Hit(
        "",
        f"read as DeepSpeed's hjson; HF Trainer and Accelerate would refuse the file ({elsewhere.message})",
        span=elsewhere.span,
        about="trainer",
    )


@rule("DSP081", "auto-needs-its-reader", severity=INFO, keys=[])
def auto_needs_its_reader(document: Document, hf_reader: str, guessed: bool) -> Iterator[Hit]:
    """A file with "auto" at the top level works under the HF Trainer or Accelerate alone.

    Why:    They fill the values in before DeepSpeed sees them. A plain DeepSpeed script fails on the text. Said where
            nobody named the reader.
    Given:  reader auto
    Bad:    {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": 1.0}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0}
    Fix:    none
    Source: deepspeed/runtime/config.py, _set_batch_related_parameters; transformers/integrations/deepspeed.py, trainer_config_process
    """
    refused = [member for member in members(document) if not member.strict and member.value == AUTO and member.node]
    if refused:
        named = ", ".join(title(member.pointer) for member in refused[:4])
        more = f" and {len(refused) - 4} more" if len(refused) > 4 else ""
        reader = {"trainer": "the HF Trainer", "accelerate": "Accelerate"}[hf_reader]
        yield Hit(
            refused[0].pointer,
            f'read as {reader} reads it; DeepSpeed by itself does not fill "auto" in {named}{more}, and fails on it',
            about="deepspeed",
        )
