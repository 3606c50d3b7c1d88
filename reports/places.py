"""How the machines' reports name a file, and how they know a finding again."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections import Counter

    from dsplan.schemas.finding import Finding


def relative(path: str) -> str:
    """The path from the working folder, with slashes; as it is where the file lies elsewhere."""
    given = Path(path)
    try:
        return (given.relative_to(Path.cwd()) if given.is_absolute() else PurePosixPath(given.as_posix())).as_posix()
    except ValueError:
        return given.as_posix()


def uri_of(path: str) -> str:
    """The path as a URI: relative to the working folder, or file:///... where the file lies elsewhere; percent-encoded."""
    from urllib.parse import quote

    near = relative(path)
    quoted = quote(near.encode("utf-8", "surrogateescape"))
    return f"file://{quoted}" if near.startswith("/") else quoted


def fingerprint(finding: Finding, seen: Counter[tuple[str, ...]], *more: str) -> str:
    """The same in each run, whatever moves the lines: of what is given, rule and pointer, and which of several with all it is.

    seen: how many findings of the run had them so far; counts this one.
    """
    from hashlib import sha256

    place = (*more, finding.rule, finding.pointer)
    seen[place] += 1
    parts = "\0".join([*place, str(seen[place])])
    return sha256(parts.encode("utf-8", "surrogatepass")).hexdigest()
