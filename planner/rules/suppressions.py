"""DSP06x: what the file itself asks lint not to say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsplan.planner.auditing.suppressing import IGNORE, Entry, meant
from dsplan.planner.rules.mechanism import RULES, WARNING, Hit, rule
from dsplan.planner.rules.near_names import nearest
from dsplan.schemas.positions import Document, shape

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@rule("DSP060", "unused-suppression", severity=WARNING, keys=["/dsplan/ignore"])
def unused_suppression(idle_suppressions: Sequence[Entry]) -> Iterator[Hit]:
    """A rule that the file ignores should be one that finds something in it.

    Why:    A suppression that outlives its finding hides the next one. Only rules that ran count: one that lacked --cluster
            or was left out by --select says nothing.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "dsplan": {"ignore": ["DSP001"]}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "our_own": 1, "dsplan": {"ignore": ["DSP001"]}}
    Fix:    none
    Source: docs/teams.md, "Suppressions"
    """
    for entry in idle_suppressions:
        yield Hit(entry.pointer, f"{shape(entry.pattern)} finds nothing here to ignore", remedy="remove it")


@rule("DSP061", "unknown-suppression", severity=WARNING, keys=["/dsplan/ignore"])
def unknown_suppression(document: Document) -> Iterator[Hit]:
    """What a file ignores must be the id or the name of a rule, or the beginning of ids.

    Why:    Nothing is suppressed by a name that no rule has.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "dsplan": {"ignore": ["unknown-keys"]}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "our_own": 1, "dsplan": {"ignore": ["unknown-key"]}}
    Fix:    none
    Source: docs/teams.md, "Suppressions"
    """
    listed = document.at(IGNORE)
    for index, entry in enumerate(listed if isinstance(listed, list) else ()):
        known = isinstance(entry, str) and any(meant(entry, rule.id, rule.name) for rule in RULES.values())
        if not known:
            near = nearest(entry, [rule.name for rule in RULES.values()]) if isinstance(entry, str) else None
            hint = f'did you mean "{near}"?' if near else "dsplan rules lists them"
            yield Hit(f"{IGNORE}/{index}", f"{shape(entry)} is no rule; {hint}")
