"""Loggers and weights of a script while it is traced: answered by nothing, or by shapes."""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from dsplan.planner.capturing.standing.importing import asked_by_a_library
from torch import nn

_LOGGERS = (
    "wandb",
    "tensorboard",
    "tensorboardX",
    "torch.utils.tensorboard",
    "mlflow",
    "comet_ml",
    "swanlab",
    "trackio",
    "clearml",
    "neptune",
    "aim",
)


class Anything:
    """Stands for what is not there: can be called, subclassed, entered, iterated over and asked for more."""

    def __init__(self, *_: Any, **__: Any):
        pass

    def __call__(self, *args: Any, **_: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getitem__(self, key: Any) -> Any:
        return Anything()

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __iter__(self) -> Any:
        return iter(())


def anything(name: str) -> Any:
    """An attribute of a module of which nothing is there."""
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (Anything,), {}) if name[:1].isupper() else Anything()


class _Loggers(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The script's own imports of experiment trackers find a module that does nothing, installed or not."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        of_logger = any(fullname == name or fullname.startswith(f"{name}.") for name in _LOGGERS)
        if not of_logger or asked_by_a_library():
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        module.__getattr__ = anything  # type: ignore[method-assign]


def silence(noted: list[str], when_imported: Callable[[str, Callable[[Any], None]], None]) -> None:
    """From now on: trackers do nothing, nothing is saved or compiled, and weights that are loaded are not read. noted gains what was met."""

    def note(text: str) -> None:
        if text not in noted:
            noted.append(text)

    sys.meta_path.insert(0, _Loggers())
    load = torch.load

    def save(*_: Any, **__: Any) -> None:
        pass

    @functools.wraps(load)
    def load_lazily(file: Any, *args: Any, **options: Any) -> Any:
        """Values stay in the file until they are used."""
        options["map_location"] = "cpu"
        try:
            return load(file, **{**options, "mmap": True})
        except (ValueError, RuntimeError, TypeError):  # an old format, or an open file
            return load(file, **options)

    def load_state_dict(self: nn.Module, *_: Any, **__: Any) -> Any:
        note("weights that the script loads are left out: they decide no byte")
        return torch.nn.modules.module._IncompatibleKeys([], [])

    torch.save = save

    def compile_nothing(model: Any = None, *_: Any, **__: Any) -> Any:
        return model if model is not None else lambda function: function

    setattr(torch, "load", load_lazily)  # noqa: B010
    setattr(torch, "compile", compile_nothing)  # noqa: B010
    nn.Module.compile = save  # type: ignore[method-assign]
    nn.Module.load_state_dict = load_state_dict  # type: ignore[method-assign]

    def of_safetensors(module: Any) -> None:
        module.save_file = module.save_model = save
        module.load_file = _shapes_of(note)
        module.load_model = lambda *_, **__: ([], [])

    when_imported("safetensors.torch", of_safetensors)


def _shapes_of(note: Callable[[str], None]) -> Callable[..., dict[str, torch.Tensor]]:
    def load_file(filename: Any, device: Any = "cpu") -> dict[str, torch.Tensor]:
        from safetensors import safe_open

        note("weights that the script loads are left out: they decide no byte")
        dtypes = importlib.import_module("safetensors.torch")._TYPES
        made = {}
        with safe_open(filename, framework="pt") as held:
            for name in held.keys():  # noqa: SIM118
                part = held.get_slice(name)
                made[name] = torch.empty(part.get_shape(), dtype=dtypes[part.get_dtype()], device="meta")
        return made

    return load_file
