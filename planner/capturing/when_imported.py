"""A module that is changed right after it has been imported."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any


class WhenImported(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Calls `then(module)` right after a module has been imported."""

    def __init__(self, name: str, then: Callable[[types.ModuleType], None]):
        self.name = name
        self._then = then

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            self._loader = spec.loader
            spec.loader = self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self._loader.exec_module(module)
        self._then(module)

    def __getattr__(self, name: str) -> Any:  # get_filename, is_package, ...: the true loader's affair
        if "_loader" not in self.__dict__ or name.startswith("find_"):
            raise AttributeError(name)
        return getattr(self._loader, name)
