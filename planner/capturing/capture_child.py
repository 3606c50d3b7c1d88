"""The child of a capture: `python -c START REQUEST [SCRIPT ARGS...]`; answers in a JSON file."""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
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
from dsplan.planner.capturing import progress
from dsplan.planner.capturing.captured import Captured, Engine, Recording, init_distributed, initialize
from dsplan.planner.capturing.confining import Confinement
from dsplan.planner.capturing.explaining import why_stopped
from dsplan.planner.capturing.gpuless import small_loaders, without_gpu
from dsplan.planner.capturing.hugging_face import patch_transformers
from dsplan.planner.capturing.resizing import Resize
from dsplan.planner.capturing.silencing import anything, silence
from dsplan.planner.capturing.standing import stand_ins
from dsplan.planner.capturing.when_imported import WhenImported
from dsplan.planner.models.blaming import as_problem, blame
from dsplan.planner.models.weightless import parameters_on_meta
from dsplan.runtime.launching.bootstrap import die_with_parent
from dsplan.schemas.problem import Problem


def main(recorded: Callable[[dict[str, Any], Confinement], Recording] | None = None) -> None:
    """Of the process: it never returns. recorded: the recording that a request asks for; None: a trace's."""
    request = json.loads(sys.argv[1])
    die_with_parent(request["parent_pid"])
    script = request["script"]
    answer_file = Path(request["answer"])
    progress.watch(script, Path(request["progress"]), request["parent_pid"])
    confinement = Confinement(Path(request["folder"]), lambda: _line_now(script))
    recording = (recorded or _of_a_trace)(request, confinement)
    answer: dict[str, Any]
    try:
        answer = _run(script, sys.argv[2:], recording, confinement)
    except Problem as problem:
        answer = {"problem": str(problem), "user_traceback": problem.user_traceback}
    with confinement.at_ease():
        answer_file.write_text(json.dumps(answer))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(0)  # data workers, threads and exit handlers of the script have nothing left to do


def _of_a_trace(request: dict[str, Any], confinement: Confinement) -> Recording:
    asked = {key: request[key] for key in ("precision", "recompute", "micro_batch")}
    return Recording(**asked, source=request["script"])


def _run(script: str, arguments: Sequence[str], recording: Recording, confinement: Confinement) -> dict[str, Any]:
    met: list[str] = []
    sys.path.insert(0, str(Path(script).resolve().parent))
    sys.argv = [script, *arguments]
    _as_under_a_launcher()
    _stand_in_for_deepspeed(recording)
    small_loaders()
    silence(met, lambda name, then: sys.meta_path.insert(0, WhenImported(name, then)))
    patch_transformers(met, lambda name, then: sys.meta_path.insert(0, WhenImported(name, then)))
    _watch_zero_init(recording)
    warnings.simplefilter("ignore")
    stood_in: list[str] = []
    try:
        with stand_ins() as stood_in, without_gpu(), parameters_on_meta():
            confinement.begin()
            runpy.run_path(script, run_name="__main__")
    except Captured as captured:
        answer = {**captured.answer, "zero_init": recording.zero_init}
        if "trace" in answer:
            answer["trace"]["notes"] = [*answer["trace"]["notes"], *stood_in, *met, *confinement.notes()]
        return answer
    except Problem:
        raise
    except BaseException as error:
        raise _as_problem(script, recording, error) from error
    raise Problem(_unfinished(script, recording, "ends"))


def _as_problem(script: str, recording: Recording, error: BaseException) -> Problem:
    """What the script raised, told by its line; exits too."""
    if isinstance(error, SystemExit) and error.code in (None, 0):
        return Problem(_unfinished(script, recording, "exits"))
    where, text = blame(error, Path(script))
    stopped = why_stopped(error)
    if stopped is not None:
        return Problem(f"{where}: {stopped}")
    if recording.resize is not None and recording.resize.asked is not None:
        return _not_resized(script, recording.resize, error, text)
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else f"{str(error.code)[:80]!r}"
        return Problem(f"{where}: the script exits with code {code}; its arguments go after --")
    recorded = recording.resize.timeline if recording.resize is not None else None
    blind = recorded is not None and bool(recorded.notes)
    return as_problem(error, Path(script), "the script raised", blind=blind, script=True)


def _line_now(script: str) -> str:
    line = progress.line_of(sys._getframe(1), str(Path(script).resolve()))
    return f"{script}:{line}" if line else script


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
    return f"{script} {verb} after deepspeed.initialize() without {recording.unfinished()} (arguments of the script go after --)"


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
    sys.path.insert(1, _stand_in_folder())
    sys.meta_path.append(_AnySubmodule())
    sys.meta_path.insert(0, WhenImported("deepspeed", _anything_else))


def _stand_in_folder() -> str:
    assert dsplan.runtime.__file__ is not None
    return str(Path(dsplan.runtime.__file__).parent / "launching" / "stand_in")


def take_stand_in_away() -> None:
    """From now on `import deepspeed` finds the installed one. What the script holds of the stand-in, it keeps."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        del sys.modules[name]
    sys.path.remove(_stand_in_folder())
    sys.meta_path[:] = [finder for finder in sys.meta_path if not _of_deepspeed(finder)]


def _of_deepspeed(finder: Any) -> bool:
    if isinstance(finder, WhenImported):
        return finder.name.partition(".")[0] == "deepspeed"
    return isinstance(finder, _AnySubmodule)


def _watch_zero_init(recording: Recording) -> None:
    """Whether the model is made in shards: by zero.Init, or by a from_pretrained that has reason to use it.

    Source: transformers/integrations/deepspeed.py, is_deepspeed_zero3_enabled.
    """

    def zero(module: Any) -> None:
        init = module.Init

        def noting(*args: Any, enabled: bool = True, **kwargs: Any) -> Any:
            recording.zero_init |= bool(enabled)
            return init(*args, **kwargs)

        module.Init = noting

    def models(module: Any) -> None:
        load = module.PreTrainedModel.from_pretrained.__func__

        def noting(cls: Any, /, *args: Any, **kwargs: Any) -> Any:
            integration = sys.modules.get("transformers.integrations.deepspeed")
            recording.zero_init |= integration is not None and bool(integration.is_deepspeed_zero3_enabled())
            return load(cls, *args, **kwargs)

        module.PreTrainedModel.from_pretrained = classmethod(noting)

    for name, then in (("deepspeed.zero", zero), ("transformers.modeling_utils", models)):
        sys.meta_path.insert(0, WhenImported(name, then))


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
    return anything(name)


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
