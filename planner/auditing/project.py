"""What a team asks of lint for all its files: [tool.dsplan] of the nearest pyproject.toml that has it."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsplan.planner.auditing.suppressing import meant
from dsplan.planner.rules.near_names import nearest
from dsplan.planner.rules.policy import Policy, validator_of
from dsplan.schemas.finding import READERS, SEVERITIES, FileFindings, Finding, Span
from dsplan.schemas.positions import Lines, escape, shape
from dsplan.schemas.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dsplan.schemas.cluster import Cluster

FILE = "pyproject.toml"
_OURS = re.compile(r"""tool["']?\s*\.\s*["']?dsplan\b|^\s*\[\s*["']?tool["']?\s*\]""", re.M)
"""A text without it has no [tool.dsplan], and is not parsed."""
FAIL_ON = ("error", "warning")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Project:
    """One [tool.dsplan]. What it does not say is empty or None."""

    file: str
    """As it is shown."""
    folder: str
    """Absolute: what its globs are relative to."""
    text: str
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    per_file_ignores: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fail_on: str | None = None
    reader: str | None = None
    cluster: Cluster | None = None
    deepspeed_version: str | None = None
    policies: tuple[Policy, ...] = ()

    def ignored_in(self, path: str) -> tuple[str, ...]:
        """What the globs that match the file ignore in it."""
        return tuple(pattern for glob in self.globs_of(path) for pattern in self.per_file_ignores[glob])

    def globs_of(self, path: str) -> list[str]:
        """The globs of per-file-ignores that match the file."""
        if not self.per_file_ignores or path == "-":
            return []
        below = Path(os.path.relpath(os.path.abspath(path), self.folder)).as_posix()
        return [glob for glob in self.per_file_ignores if glob_matches(glob, below)]


def glob_matches(glob: str, path: str) -> bool:
    """A glob with a slash is matched against the whole path, one without against the file's name. ** spans folders."""
    if "/" not in glob:
        path = path.rpartition("/")[2]
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[!?[^]/][^]/]*\])", glob.removeprefix("./"))
    try:
        return re.fullmatch("".join(map(_meaning, parts)), path, re.S) is not None
    except re.error:  # a range the wrong way round, as [z-a]
        return False


def _meaning(part: str) -> str:
    """A part of a glob as a pattern."""
    if part[:1] == "[" and part[-1:] == "]":
        inside = part[1:-1].replace("\\", r"\\")
        return f"[^{inside[1:]}]" if inside.startswith("!") else "[" + inside.replace("^", r"\^") + "]"
    return {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}.get(part, re.escape(part))


def finder() -> Callable[[str], Project | None]:
    """A function from a file's name to its project. Each folder is looked at once."""
    known: dict[str, Project | None] = {}

    def of_folder(folder: str) -> Project | None:
        if folder not in known:
            file = os.path.join(folder, FILE)
            project = read_project(file) if os.path.isfile(file) else None
            parent = os.path.dirname(folder)
            known[folder] = project if project is not None or parent == folder else of_folder(parent)
        return known[folder]

    def find(path: str) -> Project | None:
        return of_folder(os.getcwd() if path == "-" else os.path.dirname(os.path.abspath(path)))

    return find


def none(name: str) -> Project | None:
    """The finder for texts that belong to no project."""
    return None


def read_project(file: str) -> Project | None:
    """The [tool.dsplan] of a pyproject.toml; None where it has none. Problem in one line where it is wrong."""
    try:
        content = Path(file).read_bytes()
        text = content.decode("utf-8")
    except OSError:
        return None  # other tools will say so; it is none of ours
    except UnicodeDecodeError as error:
        if b"dsplan" not in content:
            return None
        raise Problem(f"{file}: is not UTF-8 text (byte {error.start}), as TOML must be; save it as UTF-8") from None
    if _OURS.search(text) is None:
        return None
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    shown = shown_path(file)
    try:
        tool = tomllib.loads(text).get("tool")
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else error
        raise Problem(f"{shown}: is not TOML ({reason})") from error
    table = tool.get("dsplan") if isinstance(tool, dict) else None
    if table is None:
        return None
    return _project(table, shown, os.path.dirname(os.path.abspath(file)), text)


def shown_path(file: str) -> str:
    """Relative where it lies below the working folder."""
    relative = os.path.relpath(file)
    return file if relative.startswith("..") else relative


def _project(table: Any, shown: str, folder: str, text: str) -> Project:
    _known(table, f"{shown}: [tool.dsplan]", _READ)
    return Project(
        file=shown,
        folder=folder,
        text=text,
        **{
            field: read(table[key], f"{shown}: [tool.dsplan] {key}")
            for key, (field, read) in _READ.items()
            if key in table
        },
    )


def _known(table: Any, where: str, keys: Mapping[str, Any]) -> None:
    if not isinstance(table, dict):
        raise Problem(f"{where} is {shape(table)}, but must be a table")
    for key in table:
        if key not in keys:
            near = nearest(key, keys)
            hint = f"did you mean {near}?" if near else f"its keys are {', '.join(keys)}"
            raise Problem(f"{where} has no key {shape(key)}; {hint}")


def _texts(value: Any, where: str) -> tuple[str, ...]:
    wrong = [entry for entry in value if not isinstance(entry, str)] if isinstance(value, list) else [value]
    if wrong:
        verb = "holds" if isinstance(value, list) else "is"
        raise Problem(f'{where} {verb} {shape(wrong[0])}, but must be a list of rule ids, for example ["DSP202"]')
    return tuple(value)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise Problem(f"{where} is {shape(value)}, but must be a text")
    return value


def _one_of(words: Sequence[str]) -> Callable[[Any, str], str]:
    def read(value: Any, where: str) -> str:
        if value not in words:
            raise Problem(f"{where} is {shape(value)}, but must be one of {', '.join(words)}")
        return str(value)

    return read


def _per_file(value: Any, where: str) -> dict[str, tuple[str, ...]]:
    if not isinstance(value, dict):
        raise Problem(f'{where} is {shape(value)}, but must be a table, for example {{"old/*.json" = ["DSP202"]}}')
    return {glob: _texts(entry, f"{where} {shape(glob)}") for glob, entry in value.items()}


def _cluster(value: Any, where: str) -> Cluster:
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else _text(value, where)
    if text.endswith(".json") or "/" in text or text == "local":
        raise Problem(f"{where} is {shape(value)}; give it as GPUs x kind (8xH100-80GB), or as a number of GPUs")
    try:
        from dsplan.schemas.cluster import parse_cluster

        return parse_cluster(text)
    except Problem as problem:
        raise Problem(f"{where}: {str(problem).removeprefix('--cluster ')}") from problem


def _boolean(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise Problem(f"{where} is {shape(value)}, but must be true or false")
    return value


def _pointer(value: Any, where: str) -> str:
    if not isinstance(value, str) or (value and not value.startswith("/")):
        raise Problem(f'{where} is {shape(value)}, but must be a JSON pointer, for example "/zero_optimization/stage"')
    return value


def _schema(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise Problem(f"{where} is {shape(value)}, but must be a table, for example {{enum = [2, 3]}}")
    return value


def _policies(value: Any, where: str) -> tuple[Policy, ...]:
    if not isinstance(value, dict):
        raise Problem(f"{where} is {shape(value)}, but must be a table of policies")
    policies = []
    for name, table in value.items():
        here = f"{where} {name}"
        _known(table, here, _POLICY)
        if "pointer" not in table:
            raise Problem(f'{here} lacks pointer, for example pointer = "/zero_optimization/stage"')
        if "schema" not in table and table.get("required") is not True:
            raise Problem(f"{here} asks for nothing; give it a schema, or required = true")
        members = {key: read(table[key], f"{here} {key}") for key, read in _POLICY.items() if key in table}
        policy = Policy(name=name, home=where.partition(":")[0], **{"schema": {}, **members})
        validator_of(policy)
        policies.append(policy)
    return tuple(policies)


_POLICY: dict[str, Callable[[Any, str], Any]] = {
    "pointer": _pointer,
    "schema": _schema,
    "message": _text,
    "severity": _one_of(SEVERITIES),
    "required": _boolean,
}
_READ: dict[str, tuple[str, Callable[[Any, str], Any]]] = {
    "select": ("select", _texts),
    "ignore": ("ignore", _texts),
    "per-file-ignores": ("per_file_ignores", _per_file),
    "fail-on": ("fail_on", _one_of(FAIL_ON)),
    "for": ("reader", _one_of(("auto", *READERS))),
    "cluster": ("cluster", _cluster),
    "deepspeed-version": ("deepspeed_version", _text),
    "policy": ("policies", _policies),
}
"""Each key of [tool.dsplan] to the field of Project that holds it, and what reads it."""


def fails(found: Sequence[FileFindings], fail_on: str | None) -> bool:
    """A finding is severe enough: as --fail-on says, else the file's project, else from error."""
    find = finder()
    for file in found:
        project = find(file.path) if fail_on is None else None
        least = fail_on or (project.fail_on if project else None) or "error"
        if any(finding.severity in SEVERITIES[: SEVERITIES.index(least) + 1] for finding in file.findings):
            return True
    return False


def idle_ignores(
    found: Sequence[FileFindings],
    paths: Sequence[str],
    ran: Callable[[Project], Sequence[tuple[str, str]]],
) -> list[FileFindings]:
    """What per-file-ignores asks for in vain, as findings in the projects' own files (DSP060).

    An entry is judged where every file that its glob can match was linted: its folder was, or it names one file.
    ran: the rules (id, name) that --select and --ignore leave.
    """
    find = finder()
    files_of: dict[Project, list[FileFindings]] = {}
    for file in found:
        project = find(file.path)
        if project is not None and project.per_file_ignores:
            files_of.setdefault(project, []).append(file)
    folders = [os.path.join(os.path.abspath(path), "") for path in paths if os.path.isdir(path)]
    idle = []
    for project, files in files_of.items():
        whole = any(os.path.join(project.folder, "").startswith(folder) for folder in folders)
        rules = ran(project)
        findings = tuple(
            _idle(project, glob, pattern)
            for glob, patterns in project.per_file_ignores.items()
            if whole or ("/" in glob and not {"*", "?", "["} & set(glob))
            for pattern in patterns
            if _in_vain(pattern, [file for file in files if glob in project.globs_of(file.path)], rules)
        )
        if findings and any(id == "DSP060" for id, _ in rules):
            idle.append(FileFindings(file=project.file, read_as="deepspeed", text=project.text, findings=findings))
    return idle


def _in_vain(pattern: str, files: Sequence[FileFindings], rules: Sequence[tuple[str, str]]) -> bool:
    """Files were there to ignore it in, all its rules ran on them, and none found anything."""
    wanted = {id for id, name in rules if meant(pattern, id, name)}
    ran = all(file.ran is None or wanted <= file.ran for file in files)
    hidden = any(meant(pattern, finding.rule, finding.name) for file in files for finding in file.suppressed)
    return bool(files and wanted) and ran and not hidden


def _idle(project: Project, glob: str, pattern: str) -> Finding:
    return Finding(
        rule="DSP060",
        name="unused-suppression",
        severity="warning",
        pointer=f"/tool/dsplan/per-file-ignores/{escape(glob)}/{escape(pattern)}",
        span=_place(project.text, glob, pattern),
        message=f"per-file-ignores: {shape(pattern)} finds nothing to ignore in {shape(glob)}",
        about="deepspeed",
        remedy="remove it",
    )


def _place(text: str, glob: str, pattern: str) -> Span:
    """Of the pattern behind its glob, as far as it can be found."""
    quoted = re.search(rf"""(["']){re.escape(glob)}\1\s*=[^\]]*?(["']){re.escape(pattern)}\2""", text)
    end = quoted.end() if quoted else 0
    return Lines(text).span(end - len(pattern) - 2 if quoted else 0, end)
