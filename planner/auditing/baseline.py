"""Findings that a team has accepted for now, in a file: known by configuration, rule and pointer, not by line."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsplan.schemas.jsonfile import read_text
from dsplan.schemas.positions import shape
from dsplan.schemas.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dsplan.schemas.finding import FileFindings, Finding

DEFAULT = "dsplan-baseline.json"
Key = tuple[str, str, str]
"""Configuration (relative to the baseline's folder, with slashes), rule, pointer."""


@dataclass(frozen=True, slots=True)
class Compared:
    """The findings that the baseline does not know, how many it knew, and what it holds that is no longer found."""

    files: list[FileFindings]
    known: int
    gone: list[Key]


def compared(files: Sequence[FileFindings], path: str) -> Compared:
    """Each file's findings less those in the baseline. Problem where that file cannot be read.

    An entry is gone where its configuration was linted, its rule could run, and it was found less often than it is held.
    """
    held = read(path)
    left = Counter(held)
    told = []
    for file in files:
        new = []
        for finding in file.findings:
            key = _key(file, finding, path)
            if left[key] > 0:
                left[key] -= 1
            else:
                new.append(finding)
        told.append(replace(file, findings=tuple(new)))
    judged = _judged(files, path)
    gone = [key for key, count in left.items() if count > 0 and judged(key)]
    known = sum(held.values()) - sum(left.values())
    return Compared(told, known, gone)


def write(files: Sequence[FileFindings], path: str) -> int:
    """Writes all findings down, and how many there are. What the old baseline says of other configurations and rules stays.

    Problem where the file cannot be written, or holds something else than a baseline.
    """
    before = read(path) if os.path.exists(path) else Counter[Key]()
    judged = _judged(files, path)
    found = Counter(_key(file, finding, path) for file in files for finding in file.findings)
    kept = {key: count for key, count in before.items() if not judged(key)}
    entries = [
        {"file": name, "rule": rule, "pointer": pointer, "count": count}
        for (name, rule, pointer), count in sorted({**kept, **found}.items())
    ]
    try:
        Path(path).write_text(json.dumps({"version": 1, "findings": entries}, indent=2) + "\n", "utf-8")
    except OSError as error:
        raise Problem(f"{path}: cannot be written ({error.strerror or error})") from error
    return sum(found.values())


def _judged(files: Sequence[FileFindings], path: str) -> Callable[[Key], bool]:
    """Whether an entry's configuration was linted, and by its rule."""
    by_name = {_name(file, path): file for file in files}

    def judged(key: Key) -> bool:
        file = by_name.get(key[0])
        return file is not None and (file.ran is None or key[1] in file.ran)

    return judged


def read(path: str) -> Counter[Key]:
    """The baseline's entries, each with its count. Problem in one line where it is none."""
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Problem(f"{path}: is no baseline ({_reason(error)}); --write-baseline {path} makes one") from error
    if not isinstance(value, dict) or value.get("version") != 1 or not isinstance(value.get("findings"), list):
        raise Problem(f'{path}: is no baseline (it lacks "version": 1 or "findings"); name another file')
    held = Counter[Key]()
    for number, entry in enumerate(value["findings"]):
        held[_entry(entry, f"{path}: findings.{number}")] += entry.get("count", 1)
    return held


def holds_one(path: str) -> bool:
    """The file is a baseline."""
    try:
        read(path)
    except Problem:
        return False
    return True


def _entry(entry: Any, where: str) -> Key:
    if not isinstance(entry, dict):
        raise Problem(f"{where} is {shape(entry)}, but must be an object")
    for name in ("file", "rule", "pointer"):
        if not isinstance(entry.get(name), str):
            raise Problem(f"{where}: {name} is {shape(entry.get(name))}, but must be a text")
    count = entry.get("count", 1)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise Problem(f"{where}: count is {shape(count)}, but must be a number of at least 1")
    return entry["file"], entry["rule"], entry["pointer"]


def _key(file: FileFindings, finding: Finding, path: str) -> Key:
    return _name(file, path), finding.rule, finding.pointer


def _name(file: FileFindings, path: str) -> str:
    """The configuration as seen from the baseline's folder, so that it is the same wherever lint is called."""
    if file.file == "-":
        return file.file
    folder = os.path.dirname(os.path.abspath(path))
    try:
        near = os.path.relpath(os.path.abspath(file.path), folder)
    except ValueError:  # another drive
        near = os.path.abspath(file.path)
    return Path(near).as_posix() + file.lasting_part


def _reason(error: Exception) -> str:
    return "nested too deep" if isinstance(error, RecursionError) else str(error)
