"""manifest.json of a checkpoint: which files belong to it, how long each is and its checksum.

    {"version": 1, "tag": "global_step12", "written_seconds": 1780000000.5,
     "files": {"state.json": {"bytes": 812, "sha256": "..."}, ...}, "sha256": "..."}

It is the last file of a checkpoint to be written, before the folder gets its name; the sha256 at its end is that of the
rest of it. Files of another step differ in their checksums, since each holds its tag.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from dsplan.schemas.problem import Problem

NAME = "manifest.json"
ASIDE = ".partial_"
"""Begins the name of what is being written: no `global_step*` finds it."""
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class File:
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    tag: str
    files: dict[str, File]
    """By name in the checkpoint's folder, all but the manifest itself."""
    written_seconds: float
    """Unix time at which it was written: what tells the newer of two checkpoints."""


def write_manifest(folder: Path, tag: str, files: Mapping[str, File]) -> Manifest:
    """The manifest, on disk (fsync) when this returns. OSError where it cannot be written."""
    manifest = Manifest(tag, dict(sorted(files.items())), time.time())
    write_whole(folder / NAME, _text(manifest))
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Problem that names the file where it is absent, unreadable or not as it was written."""
    path = folder / NAME
    try:
        text = path.read_bytes()
    except OSError as error:
        raise Problem(f"{path}: {'is absent' if isinstance(error, FileNotFoundError) else error.strerror}") from error
    try:
        held = json.loads(text)
        files = {str(name): File(int(entry["bytes"]), str(entry["sha256"])) for name, entry in held["files"].items()}
        manifest = Manifest(str(held["tag"]), files, float(held["written_seconds"]))
        version = held["version"]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Problem(f"{path}: is no manifest of a checkpoint ({len(text)} bytes)") from error
    if version != 1:
        raise Problem(f"{path}: is of version {version}, but this release reads version 1")
    if text != _text(manifest).encode():
        raise Problem(f"{path}: is not as it was written (its own checksum differs)")
    return manifest


def faults(folder: Path) -> list[str]:
    """Each names a file and what is wrong with it; none where the checkpoint is whole. Reads every byte of it."""
    found = rough_faults(folder)
    if found:
        return found
    manifest = read_manifest(folder)
    return [fault for name in manifest.files if (fault := checksum_fault(folder, manifest, name)) is not None]


def rough_faults(folder: Path) -> list[str]:
    """The faults that names and lengths tell, without reading the files."""
    try:
        manifest = read_manifest(folder)
        present = {entry.name: entry.stat().st_size for entry in os.scandir(folder)}
    except Problem as problem:
        return [str(problem)]
    except OSError as error:
        return [f"{folder}: {error.strerror}"]
    if manifest.tag != folder.name:
        return [f"{folder / NAME}: belongs to {manifest.tag}, not to {folder.name}"]
    found = []
    for name, file in manifest.files.items():
        if name not in present:
            found.append(f"{folder / name}: is absent")
        elif present[name] != file.bytes:
            found.append(f"{folder / name}: has {present[name]} bytes instead of {file.bytes}")
    return found + [
        f"{folder / name}: is not in the manifest, so it is of another checkpoint"
        for name in sorted(present)
        if name not in manifest.files and name.endswith((".safetensors", ".safetensors.index.json"))
    ]


def checksum_fault(folder: Path, manifest: Manifest, name: str) -> str | None:
    """What is wrong with the content of one file, or None. Reads it whole, piece by piece."""
    digest = hashlib.sha256()
    try:
        with open(folder / name, "rb") as file:
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
    except OSError as error:
        return f"{folder / name}: {error.strerror}"
    if digest.hexdigest() != manifest.files[name].sha256:
        return f"{folder / name}: checksum differs: it is damaged, or of another checkpoint"
    return None


def complete_tags(folder: Path) -> list[str]:
    """The checkpoints under a folder whose files are all there at their lengths, newest first. Does not read them whole."""
    ages: dict[str, float] = {}
    try:
        entries = [entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith(".")]
    except OSError:
        return []
    for tag in entries:
        if (folder / tag / NAME).exists() and not rough_faults(folder / tag):
            ages[tag] = read_manifest(folder / tag).written_seconds
    return sorted(ages, key=lambda tag: (ages[tag], tag), reverse=True)


def write_whole(path: Path, text: str) -> File:
    """Write a text file so that it is on disk (fsync) when this returns."""
    data = text.encode()
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return File(len(data), hashlib.sha256(data).hexdigest())


def sync_folder(folder: Path) -> None:
    """Make the names in a folder last (fsync), where the system can do that to a folder."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)


def _text(manifest: Manifest) -> str:
    """One form alone, so that any other byte in the file shows."""
    body = json.dumps({"version": 1, **asdict(manifest)}, indent=1)
    digest = hashlib.sha256(body.encode()).hexdigest()
    return f'{body[:-2]},\n "sha256": "{digest}"\n}}\n'
