"""A script's writes and its network: the first are kept in a temporary folder, where it finds them again; the second is refused.

Of what goes through Python: a library that opens files or sockets from its own C code is told by environment variables.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "WANDB_MODE": "disabled",
    "WANDB_SILENT": "true",
    "COMET_MODE": "disabled",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""What libraries are told, so that they do not try."""

_READING = (
    "git",
    "nvidia-smi",
    "nvcc",
    "hostname",
    "uname",
    "lscpu",
    "nproc",
    "which",
    "ldconfig",
    "gcc",
    "g++",
    "c++",
    "cc",
    "ninja",
)
"""Programs that a script may run: they tell it about the machine."""

_LOOPBACK = ("127.", "::1", "localhost", "0.0.0.0")


class Refused(ConnectionRefusedError, PermissionError):
    """What the script may not do while it is traced. asked: in a few words; way: round it."""

    def __init__(self, asked: str, way: str):
        super().__init__(f"{asked} is refused while dsplan traces the script")
        self.asked = asked
        self.way = way


class Confinement:
    """Where the script's writes go, and what it was refused. `first_written`: the path as the script gave it."""

    def __init__(self, folder: Path, watched: Callable[[], str]):
        self.folder = str(folder)
        self.shadow = os.path.join(self.folder, "written")
        self.written: dict[str, None] = {}
        self.refused: dict[str, None] = {}
        self._watched = watched
        self._original = {name: getattr(os, name) for name in (*_READERS, *_WRITERS, "rename", "replace", "open")}
        self._busy = False

    def notes(self) -> list[str]:
        lines = [f"{what} was refused while the script was traced ({where})" for what, where in self._refusals()]
        if self.written:
            count = len(self.written)
            many = f"{count} files" if count > 1 else "a file"
            lines.append(
                f"the script wrote {many} ({next(iter(self.written))}{', ...' if count > 1 else ''}), kept nowhere"
            )
        return lines

    def _refusals(self) -> list[tuple[str, str]]:
        return [tuple(line.split("\n")) for line in self.refused]  # type: ignore[misc]

    # where a path leads

    def free(self, path: Any) -> bool:
        """A descriptor, a device, or something within the temporary folder."""
        if not isinstance(path, (str, bytes, os.PathLike)):
            return True
        full = self._full(path)
        return full.startswith((self.folder + os.sep, "/dev/", "/proc/")) or full == self.folder

    def seen(self, path: Any) -> Any:
        """Where a path is read from: what the script wrote, if it did."""
        if self.free(path):
            return path
        shadowed = self._shadowed(path)
        return shadowed if self._exists(shadowed) else path

    def kept(self, path: Any, *, contents: bool = False) -> Any:
        """Where a path is written to; contents: with what was there before."""
        if self.free(path):
            return path
        full, shadowed = self._full(path), self._shadowed(path)
        self.written.setdefault(os.path.relpath(full) if full.startswith(os.getcwd() + os.sep) else full, None)
        self._make_parents(shadowed)
        if contents and not self._exists(shadowed) and os.path.isfile(full):
            with self.at_ease():
                shutil.copyfile(full, shadowed)
        return shadowed

    def _full(self, path: Any) -> str:
        return os.path.abspath(os.fsdecode(path))

    def _shadowed(self, path: Any) -> str:
        return self.shadow + self._full(path)

    def _exists(self, path: str) -> bool:
        try:
            self._original["lstat"](path)
        except OSError:
            return False
        return True

    def _make_parents(self, path: str) -> None:
        parent = os.path.dirname(path)
        if not self._exists(parent):
            self._make_parents(parent)
            with contextlib.suppress(FileExistsError):
                self._original["mkdir"](parent)

    @contextlib.contextmanager
    def at_ease(self) -> Iterator[None]:
        """Our own work."""
        before, self._busy = self._busy, True
        try:
            yield
        finally:
            self._busy = before

    def refuse(self, asked: str, way: str) -> Refused:
        self.refused.setdefault(f"{asked}\n{self._watched()}", None)
        return Refused(asked, way)

    # what is put in place

    def begin(self) -> None:
        """From now on, for the rest of the process."""
        os.makedirs(self.shadow, exist_ok=True)
        sys.dont_write_bytecode = True
        shutil._use_fd_functions = False  # type: ignore[attr-defined]
        for name in _READERS:
            setattr(os, name, self._reader(name))
        for name in _WRITERS:
            setattr(os, name, self._writer(name))
        for name in ("rename", "replace"):
            setattr(os, name, self._mover(name))
        os.open = self._os_open(os.open)
        builtins.open = io.open = self._open(builtins.open)
        os.scandir = self._scandir(os.scandir)
        os.listdir = lambda path=".": list({entry.name: None for entry in os.scandir(path)})
        sys.addaudithook(self._audit)

    def _reader(self, name: str) -> Callable[..., Any]:
        original = self._original[name]

        def read(path: Any, *args: Any, **kwargs: Any) -> Any:
            return original(path if kwargs.get("dir_fd") is not None else self.seen(path), *args, **kwargs)

        return read

    def _writer(self, name: str) -> Callable[..., Any]:
        original = self._original[name]

        def write(path: Any, *args: Any, **kwargs: Any) -> Any:
            if self.free(path) or kwargs.get("dir_fd") is not None:
                return original(path, *args, **kwargs)
            shadowed = self._shadowed(path)
            if name == "mkdir":
                if os.path.lexists(path):
                    raise FileExistsError(17, "File exists", os.fspath(path))
                self._make_parents(shadowed)
                return original(shadowed, *args, **kwargs)
            return original(shadowed, *args, **kwargs) if self._exists(shadowed) else None

        return write

    def _mover(self, name: str) -> Callable[..., Any]:
        original = self._original[name]

        def move(source: Any, target: Any, **kwargs: Any) -> Any:
            if self.free(source) and self.free(target):
                return original(source, target, **kwargs)
            return original(self.kept(source, contents=True), self.kept(target))

        return move

    def _os_open(self, original: Callable[..., int]) -> Callable[..., int]:
        writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

        def open_descriptor(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            if dir_fd is None:
                path = self.kept(path, contents=not flags & os.O_TRUNC) if flags & writing else self.seen(path)
            return original(path, flags, mode, dir_fd=dir_fd)

        return open_descriptor

    def _open(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def open_file(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if isinstance(mode, str) and any(letter in mode for letter in "wax+"):
                return original(self.kept(file, contents="w" not in mode), mode, *args, **kwargs)
            return original(self.seen(file), mode, *args, **kwargs)

        return open_file

    def _scandir(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def scandir(path: Any = ".") -> _Entries:
            if self.free(path):
                return _Entries(list(original(path)))
            entries: dict[str, Any] = {}
            shadowed = self._shadowed(path)
            if not self._exists(shadowed) or os.path.isdir(self._full(path)):
                with contextlib.suppress(FileNotFoundError) if self._exists(shadowed) else contextlib.nullcontext():
                    entries = {entry.name: entry for entry in original(path)}
            if self._exists(shadowed):
                entries.update({entry.name: entry for entry in original(shadowed)})
            return _Entries(list(entries.values()))

        return scandir

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        """What came by another way than those above. Source: docs.python.org/3/library/audit_events.html."""
        if self._busy:
            return
        if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
            address = (
                args[1] if event in ("socket.connect", "socket.sendto") else (args[0], args[1] if len(args) > 1 else 0)
            )
            self._check_address(address)
        elif event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "pty.spawn"):
            self._check_program(event, args)
        elif event == "open" and args and isinstance(args[2], int):
            if args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND):
                self._check_path(args[0])
        elif event in ("os.remove", "os.rmdir", "os.mkdir", "os.truncate") or event == "sqlite3.connect":
            if not (event == "sqlite3.connect" and ":memory:" in str(args[0])):
                self._check_path(args[0])
        elif event in ("os.rename", "os.link", "os.symlink"):
            self._check_path(args[1])

    def _check_address(self, address: Any) -> None:
        host = address[0] if isinstance(address, tuple) and address else None
        if isinstance(host, bytes):
            host = host.decode(errors="replace")
        if not isinstance(host, str) or not host or host.startswith(_LOOPBACK):
            return
        raise self.refuse(
            f"the network ({host})", "fetch what it needs before and give a local path, or let the script skip it"
        )

    def _check_program(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen":
            given = args[1]
            words = given if isinstance(given, (list, tuple)) else str(given).split()
        else:
            words = os.fsdecode(args[0]).split()
        program = os.path.basename(os.fsdecode(words[0])) if words else "a program"
        if program in _READING:
            return
        if program in ("sh", "bash") and len(words) > 2 and os.path.basename(str(words[2]).split()[0]) in _READING:
            return
        raise self.refuse(f"running another program ({program})", "do it before, or let the script skip it")

    def _check_path(self, path: Any) -> None:
        if not self.free(path):
            raise self.refuse(f"writing {os.fsdecode(path)}", "let the script skip it (its arguments go after --)")


class _Entries:
    """What os.scandir gives: an iterator that can be closed."""

    def __init__(self, entries: list[Any]):
        self._entries = iter(entries)

    def __iter__(self) -> _Entries:
        return self

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass


_READERS = ("stat", "lstat", "access", "readlink", "chdir")
_WRITERS = ("mkdir", "rmdir", "remove", "unlink", "chmod", "utime", "truncate")
