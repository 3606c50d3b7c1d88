"""The child of a capture: `python -c START REQUEST [SCRIPT ARGS...]`; answers in a JSON file."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import runpy
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import dsplan.runtime
import torch
import torch.distributed as dist
from dsplan.planner.capturing.captured import Captured, Engine, Recording, init_distributed, initialize
from dsplan.planner.capturing.gpuless import small_loaders, without_gpu
from dsplan.planner.capturing.resizing import Resize
from dsplan.planner.models.blaming import as_problem, blame
from dsplan.planner.models.weightless import parameters_on_meta
from dsplan.schemas.problem import Problem


def main() -> None:
    """Of the process: it never returns."""
    request = json.loads(sys.argv[1])
    script = request["script"]
    answer_file = Path(request["answer"])
    answer: dict[str, Any]
    try:
        answer = _run(
            script,
            sys.argv[2:],
            Recording(**{key: request[key] for key in ("precision", "recompute", "micro_batch")}, source=script),
        )
    except Problem as problem:
        answer = {"problem": str(problem), "user_traceback": problem.user_traceback}
    answer_file.write_text(json.dumps(answer))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # data workers, threads and exit handlers of the script have nothing left to do


def _run(script: str, arguments: Sequence[str], recording: Recording) -> dict[str, Any]:
    sys.path.insert(0, str(Path(script).resolve().parent))
    sys.argv = [script, *arguments]
    _as_under_a_launcher()
    _stand_in_for_deepspeed(recording)
    small_loaders()
    sys.meta_path.insert(0, _WhenImported("transformers.modeling_utils", _from_config))
    warnings.simplefilter("ignore")
    try:
        with without_gpu(), parameters_on_meta():
            runpy.run_path(script, run_name="__main__")
    except Captured as captured:
        return captured.answer
    except Problem:
        raise
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            raise Problem(_unfinished(script, recording, "exits")) from None
        where, text = blame(error, Path(script))
        if recording.resize is not None and recording.resize.asked is not None:
            raise _not_resized(script, recording.resize, error, text) from error
        if isinstance(error, SystemExit):
            raise Problem(f"{where}: the script exits with code {error.code}; its arguments go after --") from None
        recorded = recording.resize.timeline if recording.resize is not None else None
        blind = recorded is not None and bool(recorded.notes)
        raise as_problem(error, Path(script), "the script raised", blind=blind, script=True) from error
    raise Problem(_unfinished(script, recording, "ends"))


def _not_resized(script: str, resize: Resize, error: BaseException, text: str | None) -> Problem:
    """The script runs at the batch that it feeds, but not at another."""
    names: list[str] = []
    for tensor in resize.left_as_they_were():
        held = [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__)]
        name = next((key for scope in held for key, value in scope.items() if value is tensor), "a tensor")
        names.append(f"{name} of shape {list(tensor.shape)}")
    why = f"{' and '.join(names)} may or may not hold the batch" if names else f"it then raises {type(error).__name__}"
    return Problem(
        f"{script}: micro_batch {resize.asked} is asked for, but the script feeds {resize.fed}, and its batch cannot be "
        f"resized: {why}; let the script feed {resize.asked} itself (its arguments go after --)",
        user_traceback=text,
    )


def _unfinished(script: str, recording: Recording, verb: str) -> str:
    if not recording.initialized:
        return (
            f"{script}: neither build_model() nor a call of deepspeed.initialize() was found (it {verb} without); add one of "
            "the two"
        )
    return (
        f"{script} {verb} after deepspeed.initialize() without a call of engine.backward(); let it make at least one "
        "training step (arguments of the script go after --)"
    )


def _as_under_a_launcher() -> None:
    alone = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    for name, value in alone.items():
        os.environ.setdefault(name, value)

    def init_process_group(*_: Any, **__: Any) -> None:
        init_distributed()

    dist.init_process_group = init_process_group


def _stand_in_for_deepspeed(recording: Recording) -> None:
    """`import deepspeed` finds the bundled stand-in, whose initialize (and dsplan.runtime's) records."""

    def record(*args: Any, **kwargs: Any) -> Any:
        return initialize(recording, *args, **kwargs)

    for name, value in (("initialize", record), ("Engine", Engine), ("init_distributed", init_distributed)):
        setattr(dsplan.runtime, name, value)
    assert dsplan.runtime.__file__ is not None
    sys.path.insert(1, str(Path(dsplan.runtime.__file__).parent / "stand_in"))
    sys.meta_path.append(_AnySubmodule())
    sys.meta_path.insert(0, _WhenImported("deepspeed", _anything_else))


class _Anything:
    """Stands for what the stand-in lacks: can be called, subclassed, entered and asked for more."""

    def __init__(self, *_: Any, **__: Any):
        pass

    def __call__(self, *args: Any, **_: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _anything(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if name == "PipelineModule":
        raise Problem(
            "the script trains a PipelineModule, which is not traced yet; give a model file with build_model()"
        )
    if name in ("checkpoint", "checkpointing"):
        return (
            torch.utils.checkpoint.checkpoint
            if name == "checkpoint"
            else importlib.import_module("deepspeed.checkpointing")
        )
    return type(name, (_Anything,), {}) if name[:1].isupper() else _Anything()


def _anything_else(module: types.ModuleType) -> None:
    module.__getattr__ = _anything  # type: ignore[method-assign]


class _AnySubmodule(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """deepspeed.X that the stand-in lacks is an empty module that has everything."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("deepspeed."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        _anything_else(module)


class _WhenImported(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Calls `then(module)` right after a module has been imported."""

    def __init__(self, name: str, then: Callable[[types.ModuleType], None]):
        self._name = name
        self._then = then

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
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


def _from_config(modeling_utils: Any) -> None:
    """from_pretrained builds from the config: weights decide no byte."""

    def from_pretrained(cls: Any, name: Any, *args: Any, config: Any = None, **options: Any) -> Any:
        if config is None:
            config = cls.config_class.from_pretrained(name)
        for key in ("attn_implementation", "_attn_implementation"):
            if key in options:
                config._attn_implementation = options[key]
        return cls(config)

    modeling_utils.PreTrainedModel.from_pretrained = classmethod(from_pretrained)  # type: ignore[arg-type]
