"""Which release of DeepSpeed a configuration is for, and which releases take it."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from dsplan.schemas.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dsplan.schemas.releases import Upgrade

NEWEST = "0.19.8"
"""schemas/releases.py's, which a plain lint does not load."""


def released(release: str | None, before: str | None = None) -> tuple[str | None, Upgrade | None]:
    """The release that was asked for the one that is meant (None: the newest), and what it is an upgrade from.

    Without a word it is the installed DeepSpeed, else the newest that is known.
    """
    version = release or installed() or NEWEST
    if version == NEWEST and before is None:
        return None, None
    from dsplan.schemas.releases import Upgrade, nearest, order

    meant = nearest(version)
    if before is None:
        return (None if meant == NEWEST else meant), None
    upgrade = Upgrade(before=nearest(before), after=meant)
    if order(upgrade.before) > order(upgrade.after):
        raise Problem(f"--from {before} is newer than --to {version}; an upgrade goes the other way")
    return (None if meant == NEWEST else meant), upgrade


def installed(path: Iterable[str] | None = None) -> str | None:
    """The version of the DeepSpeed that Python would import, by the name of its dist-info folder; None where there is none."""
    for folder in sys.path if path is None else path:
        try:
            names = os.listdir(folder or ".")
        except OSError:
            continue
        for name in names:
            if name.startswith("deepspeed-") and name.endswith(".dist-info"):
                return name.removeprefix("deepspeed-").removesuffix(".dist-info")
    return None
