"""The folder of checkpoints: what is written lies aside until it is whole, what is replaced or removed goes aside first.

    global_step12/            complete
    latest                    the tag of the newest
    .partial_global_step14/   being written, or left by a save that was killed
    .partial_latest           the tag that `latest` is to hold as soon as its folder has its name
    .replaced_global_step12/  the older of two with one tag, until the newer has its place
    .removed_global_step10/   being deleted

No name aside matches `global_step*`. What is said of files here is done by rank 0 alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from dsplan.runtime.checkpoints.manifest import ASIDE, NAME, complete_tags, rough_faults, sync_folder, write_whole
from dsplan.schemas.problem import Problem

LATEST = "latest"
REPLACED, REMOVED = ".replaced_", ".removed_"
LOCK = "lock"
"""In what is being written: a lock of the process's own (POSIX), which no child inherits."""
_writing: dict[Path, int] = {}
OWN_TAGS = re.compile(r"global_step\d+")
"""What save_checkpoint calls a checkpoint that the script gives no tag: these alone are counted by keep_last."""


def aside_of(folder: Path, tag: str) -> Path:
    return folder / f"{ASIDE}{tag}"


def put_back(folder: Path) -> None:
    """A checkpoint that a killed save had moved aside, to put a newer in its place, is there again."""
    for replaced in folder.glob(f"{REPLACED}*"):
        place = folder / replaced.name.removeprefix(REPLACED)
        if not place.exists():
            replaced.rename(place)


def decided_latest(folder: Path) -> str | None:
    """The tag of a complete checkpoint whose save was killed before it wrote `latest`."""
    try:
        tag = (folder / f"{ASIDE}{LATEST}").read_text("utf-8", "replace").strip()
    except OSError:
        return None
    return tag if is_tag(tag) and not rough_faults(folder / tag) else None


def is_tag(text: str) -> bool:
    """Whether it can be the name of a checkpoint's folder."""
    if not text or not text.isprintable() or "/" in text or text.startswith(".") or text == LATEST:
        return False
    return len(text.encode()) < 200  # a file's name has at most 255 bytes


def begin(folder: Path, tag: str) -> Path:
    """An empty folder aside; leftovers of killed saves are gone, what others are writing is not. OSError where that cannot be.

    Problem where another process is writing the same tag.
    """
    if folder.exists() and not folder.is_dir():
        raise Problem(f"{folder} is a file, but save_dir must be a folder, or a new one")
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / LATEST).is_dir():
        raise Problem(
            f"{folder / LATEST} is a folder, but must be the file that names the newest checkpoint; move it away"
        )
    put_back(folder)
    if decided_latest(folder) is not None:
        with contextlib.suppress(FileNotFoundError):  # the save that decided it is alive, and has done it
            os.replace(folder / f"{ASIDE}{LATEST}", folder / LATEST)
    aside = aside_of(folder, tag)
    if aside not in _writing and _is_being_written(aside):
        raise Problem(f"{aside} is being written by another process; give each run a folder of its own")
    for prefix in (ASIDE, REPLACED, REMOVED):
        for left in folder.glob(f"{prefix}*"):
            if left != aside and (left in _writing or _is_being_written(left)):
                continue
            shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)
    _let_go(aside)
    aside.mkdir()
    with contextlib.suppress(OSError):  # a file system without locks
        _writing[aside] = os.open(aside / LOCK, os.O_WRONLY | os.O_CREAT)
        fcntl.lockf(_writing[aside], fcntl.LOCK_EX | fcntl.LOCK_NB)
    return aside


def _let_go(aside: Path) -> None:
    descriptor = _writing.pop(aside, None)
    if descriptor is not None:
        os.close(descriptor)
        (aside / LOCK).unlink(missing_ok=True)


def _is_being_written(aside: Path) -> bool:
    """By another process: one that was killed has lost its lock."""
    try:
        file = open(aside / LOCK, "r+b")  # noqa: SIM115
    except OSError:  # it has none
        return False
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno in (errno.EACCES, errno.EAGAIN)
    return False


def give_up(folder: Path, tag: str) -> None:
    _let_go(aside_of(folder, tag))
    shutil.rmtree(aside_of(folder, tag), ignore_errors=True)
    (folder / f"{ASIDE}{LATEST}").unlink(missing_ok=True)


def put_in_place(folder: Path, tag: str, *, save_latest: bool) -> None:
    """Give the whole checkpoint its name, and only then `latest` to it."""
    aside, place, replaced = aside_of(folder, tag), folder / tag, folder / f"{REPLACED}{tag}"
    sync_folder(aside)
    wanted = folder / f"{ASIDE}{LATEST}"
    if place.exists():
        place.rename(replaced)
    if save_latest:
        write_whole(wanted, tag)
    _let_go(aside)
    aside.rename(place)
    sync_folder(folder)
    if save_latest:
        _name_latest(folder, tag)
        sync_folder(folder)
    shutil.rmtree(replaced, ignore_errors=True)


def _name_latest(folder: Path, tag: str) -> None:
    """Where several runs save into one folder, another's save may meanwhile have done it, or taken it for a leftover."""
    wanted, latest = folder / f"{ASIDE}{LATEST}", folder / LATEST
    with contextlib.suppress(FileNotFoundError):
        os.replace(wanted, latest)
    if not latest.is_file() or latest.read_text("utf-8") != tag:
        write_whole(wanted, tag)
        with contextlib.suppress(FileNotFoundError):
            os.replace(wanted, latest)


def remove_older(folder: Path, keep_last: int) -> None:
    """Of the complete checkpoints that the engine named, leave the newest keep_last; also what is being read, and `latest`."""
    try:
        newest = (folder / LATEST).read_text("utf-8").strip()
    except OSError:
        newest = ""
    for tag in [tag for tag in complete_tags(folder) if OWN_TAGS.fullmatch(tag)][keep_last:]:
        if tag == newest or _is_being_read(folder / tag):
            continue
        aside = folder / f"{REMOVED}{tag}"
        with contextlib.suppress(OSError):
            (folder / tag).rename(aside)
            shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def being_read(checkpoint: Path) -> Iterator[None]:
    """While this lasts keep_last leaves the checkpoint alone, also in another process: a shared lock on its manifest."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # no manifest, or a file system without locks
            file = stack.enter_context(open(checkpoint / NAME, "rb"))
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield


def _is_being_read(checkpoint: Path) -> bool:
    try:
        with open(checkpoint / NAME, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
