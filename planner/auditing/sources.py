"""Where lint's texts come from: files, folders, globs, stdin, and mappings inside YAML, JSON and Python files."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dsplan.schemas.jsonfile import decode, read_document, read_text, read_whole
from dsplan.schemas.known_keys import schema
from dsplan.schemas.positions import Document, SyntaxProblem
from dsplan.schemas.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

STDIN = "-"
_SKIPPED_FOLDERS = {"node_modules", "__pycache__", "build", "dist"}
_YAML, _PYTHON = (".yaml", ".yml"), (".py",)


@dataclass(frozen=True, slots=True)
class Source:
    """One configuration: `name` as reports call it, `path` of the file that holds it, and that file's text.

    embedded: what was read already, where the configuration is a part of its file.
    """

    name: str
    text: str
    path: str
    embedded: Document | SyntaxProblem | None = None


def sources(paths: Sequence[str]) -> Iterator[Source]:
    """Each configuration once, in the order of the paths. Problem where a text cannot be had.

    A path is a file, a folder (its *.json that look like DeepSpeed configurations), a glob, "-" for stdin, or a part of a
    file: train.yaml#/deepspeed (a JSON pointer), train.py#ds_config (a name that is given a dict literal).
    """
    seen: set[str] = set()
    for path in paths:
        for source in _of(path):
            where = (
                source.name if source.path == STDIN else os.path.abspath(source.path) + source.name[len(source.path) :]
            )
            if where not in seen:
                seen.add(where)
                yield source


def _of(path: str) -> Iterator[Source]:
    if path == STDIN:
        yield Source(STDIN, decode(read_whole(sys.stdin.buffer, "standard input"), "standard input"), STDIN)
    elif not path:
        raise Problem("a path is empty; leave it out to lint the folder here, or write .")
    elif path.partition("#")[0].endswith(".ipynb"):
        raise Problem(f"{path}: notebooks are not read; save it as .py (jupyter nbconvert --to script), and lint that")
    elif _exists(path):
        if Path(path).is_dir():
            below = list(_configs_below(Path(path)))
            if not below:
                raise Problem(f"{path}: no *.json below it looks like a DeepSpeed configuration; name the file itself")
            yield from below
        elif path.endswith((*_YAML, *_PYTHON)):
            part = "#/deepspeed" if path.endswith(_YAML) else "#ds_config"
            raise Problem(f"{path}: say which part of it is the configuration, as in {path}{part}")
        else:
            yield Source(path, read_text(path), path)
    elif "#" in path and _exists(path.partition("#")[0]):
        yield from _parts(path)
    elif any(char in path for char in "*?["):
        import glob

        found = sorted(glob.glob(path, recursive=True))
        if not found:
            raise Problem(f"{path}: no file matches")
        for match in found:
            yield from _of(match)
    else:
        yield Source(path, read_text(path), path)  # says what is wrong with it


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except (OSError, ValueError):
        return False


def _parts(target: str) -> Iterator[Source]:
    """The part of a file that the target names behind its #."""
    from dsplan.schemas import embedded

    path, _, fragment = target.partition("#")
    text = read_text(path)
    try:
        if path.endswith(_PYTHON):
            for name, document in embedded.python_documents(text, fragment, path):
                yield Source(f"{path}#{name}", text, path, document)
            return
        pointer = fragment if fragment in ("", "/") or fragment.startswith("/") else f"/{fragment}"
        pointer = "" if pointer == "/" else pointer
        if path.endswith(_YAML):
            document = embedded.yaml_document(text, pointer, path)
        else:
            document = embedded.at_pointer(read_document(text, "hjson"), pointer, path)
        yield Source(target, text, path, document)
    except SyntaxProblem as syntax:
        yield Source(target, text, path, syntax)


def _configs_below(folder: Path) -> Iterator[Source]:
    for file in sorted(folder.rglob("*.json")):
        inside = file.relative_to(folder).parts[:-1]
        if any(part.startswith(".") or part in _SKIPPED_FOLDERS for part in inside) or not file.is_file():
            continue
        try:
            if file.stat().st_size > 1_000_000:
                continue
            text = read_text(file)
        except (Problem, OSError):
            continue
        if looks_like_config(text, file.name):
            yield Source(str(file), text, str(file))


def looks_like_config(text: str, name: str) -> bool:
    """The text is that of a DeepSpeed configuration; one that cannot be read, by its name or the keys in it."""
    if not any(key in text for key in ("batch_size", "zero_opti", "fp16", "bf16", "gradient_")):
        return False
    own = {"train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization"}
    try:
        value = read_document(text, "hjson").value
    except SyntaxProblem:
        return name.startswith("ds_") or "deepspeed" in name or "ds_config" in name or any(key in text for key in own)
    if not isinstance(value, dict) or {"model_type", "architectures", "layout", "$defs"} & value.keys():
        return False
    blocks = [key for key, entry in value.items() if isinstance(entry, dict) and key in schema()["properties"]]
    return any(key in own for key in value) or len(blocks) >= 2 or "fp16" in blocks
