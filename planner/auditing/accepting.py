"""Which releases of DeepSpeed take a configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dsplan.planner.auditing.linting import lint_source, setting_of
from dsplan.planner.auditing.sources import sources
from dsplan.schemas.acceptance import Acceptance, Verdict
from dsplan.schemas.releases import asked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsplan.schemas.finding import FileFindings


def acceptances(paths: Sequence[str], **options: Any) -> list[Acceptance]:
    """Of each configuration what every release that was asked makes of it, oldest first. The options are those of `lint`.

    A release takes a file where no finding is one on which it raises; errors that it passes over in silence are counted.
    """
    settings = {release: setting_of(**options, release=release) for release in asked()}
    return [
        Acceptance(
            file=source.name,
            verdicts=tuple(_verdict(release, lint_source(source, setting)) for release, setting in settings.items()),
        )
        for source in sources(paths)
    ]


def _verdict(release: str, found: FileFindings) -> Verdict:
    errors = [finding for finding in found.findings if finding.severity == "error"]
    raising = [finding for finding in errors if finding.raises is not None]
    first = next(iter(raising or errors), None)
    return Verdict(release=release, accepts=not raising, errors=len(errors), first=first)
