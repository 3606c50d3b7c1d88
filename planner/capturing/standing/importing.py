"""Imports of packages that only a GPU can run: found here, for as long as a model is loaded or traced."""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dsplan.planner.capturing.standing import calls

_PARTS = {
    "flash_attn": "flash_attention",
    "xformers": "xformers",
    "liger_kernel": "liger",
    "apex": "apex",
    "bitsandbytes": "bitsandbytes",
}
"""The packages that are stood in for, and the file here that does it."""
VERSIONS = {
    "flash_attn": "2.8.3",
    "xformers": "0.0.29",
    "liger_kernel": "0.8.5",
    "apex": "0.1",
    "bitsandbytes": "0.50.2",
}
_TITLES = {"flash_attn": "flash_attn 2"}
_LIBRARIES_CHANGE_BY = ("apex",)
"""Packages whose mere presence makes transformers take other layers: offered to the user's own files alone."""


@contextmanager
def stand_ins() -> Iterator[list[str]]:
    """Packages that need a GPU can be imported and called meanwhile; the list holds, at the end, a note per package used.

    What was installed under these names is as it was afterwards. Can be nested, and entered again: the modules are the same.
    """
    named: list[str] = []
    finder = _Finder()
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if _root(name) in _PARTS}
    sys.modules.update({name: module for name, module in hidden.items() if isinstance(module, _StandIn)})
    sys.meta_path.insert(0, finder)
    try:
        with calls.listening() as heard:
            yield named
    finally:
        named += calls.notes(heard, why)
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _StandIn)]:
            del sys.modules[name]
        sys.modules.update(hidden)


def why(package: str) -> str:
    """ "flash_attn 2 is not installed", "bitsandbytes runs on a GPU alone"."""
    title = _TITLES.get(package, package)
    return f"{title} runs on a GPU alone" if _installed(package) else f"{title} is not installed"


@functools.cache
def _installed(package: str) -> bool:
    return importlib.machinery.PathFinder.find_spec(package) is not None


def _root(name: str) -> str:
    return name.partition(".")[0]


class _StandIn(types.ModuleType):
    """A module of a package that is stood in for. Its submodules are there without being imported."""

    def __getattr__(self, name: str) -> Any:
        inner = f"{self.__name__}.{name}"
        if inner in _held(inner):
            return _module(inner)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r} ({self.__file__})")


def _held(name: str) -> dict[str, dict[str, Any]]:
    """The modules of the package that `name` is of."""
    held: dict[str, dict[str, Any]] = importlib.import_module(
        f"dsplan.planner.capturing.standing.{_PARTS[_root(name)]}"
    ).MODULES
    return held


@functools.cache
def _module(name: str) -> _StandIn:
    module = _StandIn(name)
    module.__dict__.update(_held(name)[name])
    module.__file__ = f"dsplan's stand-in for {_TITLES.get(_root(name), _root(name))}, which lacks it"
    return module


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if _root(fullname) not in _PARTS or (fullname in _LIBRARIES_CHANGE_BY and asked_by_a_library()):
            return None
        if fullname not in _held(fullname):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass

    def find_distributions(self, context: Any = None) -> Sequence[importlib.metadata.Distribution]:
        """So that libraries that ask for the version of flash-attn are told one."""
        wanted = getattr(context, "name", None)
        return [
            _Distribution(package)
            for package in _PARTS
            if package not in _LIBRARIES_CHANGE_BY and (wanted is None or wanted.replace("-", "_").lower() == package)
        ]


class _Distribution(importlib.metadata.Distribution):
    def __init__(self, package: str):
        self._package = package

    def read_text(self, filename: str) -> str | None:
        if filename == "METADATA":
            name = self._package.replace("_", "-")
            return f"Metadata-Version: 2.1\nName: {name}\nVersion: {VERSIONS[self._package]}\n"
        return f"{self._package}\n" if filename == "top_level.txt" else None

    def locate_file(self, path: Any) -> Any:
        return Path(path)


def asked_by_a_library() -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith("<frozen") and Path(name).parent.name != "importlib":
            return any(part in ("site-packages", "dist-packages") for part in Path(name).parts)
        frame = frame.f_back  # type: ignore[assignment]
    return False
