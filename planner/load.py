"""The MODEL argument: told apart without running anything, then loaded without materialising a weight."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import inspect
import json
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dsplan.schemas.plan import OptimizerSpec
from dsplan.schemas.problem import Problem

if TYPE_CHECKING:
    import torch
    from dsplan.planner.flops import Flops
    from dsplan.schemas.trace import Trace
    from torch import nn

Kind = Literal["file", "hf", "script"]
TRACE_TIMEOUT_SECONDS = 600.0


@dataclass(kw_only=True)
class Subject:
    """A model that can be traced. `tracer.trace` is the one thing to do with it.

    config, optimizer and micro_batch are what a training script hands to `initialize` and feeds; known after a first
    trace, None for other kinds.
    """

    source: str
    kind: Kind
    notes: tuple[str, ...] = ()
    seq_len: int | None = None
    """As asked for by the user; None: the model's own."""
    config: dict[str, Any] | None = None
    optimizer: OptimizerSpec | None = None
    micro_batch: int | None = None
    hidden_size: int | None = None
    """Of a HF config: what Trainer fills some "auto" sizes by."""
    traces: dict[Any, Trace] = field(default_factory=dict, repr=False)


@dataclass(kw_only=True)
class ModelSubject(Subject):
    """A model that is built here: `module` lies on device meta. Without `sample_batch` only its state is known."""

    module: nn.Module = field(repr=False)
    sample_batch: Callable[[int, int | None], tuple[Any, ...] | dict[str, Any]] | None = field(default=None, repr=False)
    loss: Callable[[Any, Any], torch.Tensor] | None = field(default=None, repr=False)
    file: Path | None = None
    flops: dict[Any, Flops] = field(default_factory=dict, repr=False)


def load_subject(
    model: str,
    *,
    sets: Mapping[str, str] | None = None,
    seq_len: int | None = None,
    script_args: Sequence[str] = (),
    trace_timeout_seconds: float = TRACE_TIMEOUT_SECONDS,
) -> Subject:
    """The subject that MODEL names. Problem where it cannot be had, in one line with the remedy."""
    kind, path, name = told_apart(model)
    if kind != "file" and sets:
        raise Problem(f"--set {next(iter(sets))}=... goes to build_model() of a model file, but {model} has none")
    if kind == "hf":
        from dsplan.planner.hf import load_hf

        return load_hf(model, path, seq_len)
    if kind == "script":
        from dsplan.planner.capture import ScriptSubject

        if seq_len is not None:
            raise Problem(
                f"--seq-len is given, but {model} is a script, which feeds sequences of its own length; pass its own option after --"
            )
        return ScriptSubject(path, script_args, trace_timeout_seconds)
    if script_args:
        raise Problem(f"arguments after -- go to a training script, but {model} is a model file; use --set name=value")
    return _load_file(path, name, sets or {}, seq_len)


def told_apart(model: str) -> tuple[Kind, Path, str | None]:
    """(kind, path, NAME) of a MODEL argument, by its text and the file's text alone. Problem where it is none of them."""
    text, _, name = model.rpartition(":") if ".py:" in model else (model, "", "")
    path = Path(text)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise Problem(f"{model}: the folder holds no config.json; name the model file or script in it")
        return "hf", path / "config.json", None
    if path.suffix == ".json":
        _must_exist(path)
        return "hf", path, None
    if path.suffix == ".py":
        _must_exist(path)
        if name:
            return "file", path, name
        return ("file" if "build_model" in _top_level_names(path) else "script"), path, None
    if path.exists():
        raise Problem(
            f"{model} is neither a .py file nor a config.json; give model.py, a training script or a HF config.json"
        )
    from dsplan.planner.hf import cached_config

    return "hf", cached_config(model), None


def _must_exist(path: Path) -> None:
    if not path.is_file():
        raise Problem(f"{path}: no such file; give a model file, a training script or a HF config.json")


def _top_level_names(path: Path) -> set[str]:
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        where = f"{path}:{line}" if line else str(path)
        raise Problem(f"{where}: not valid Python: {getattr(error, 'msg', error)}; correct it and try again") from error
    except OSError as error:
        raise Problem(f"{path}: cannot be read: {error.strerror}") from error
    # names that are imported do not count: a script that imports a model file's build_model is still a script
    names = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return names


def parse_set(text: str) -> Any:
    """The value of --set name=TEXT: a Python literal, else the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _load_file(path: Path, name: str | None, sets: Mapping[str, str], seq_len: int | None) -> ModelSubject:
    from dsplan.planner.weightless import build_weightless

    _top_level_names(path)  # syntax errors first, with their line
    with user_code(path, "import raised"):
        namespace = _import(path)
    maker = getattr(namespace, name or "build_model", None)
    if maker is None:
        raise Problem(f"{path} has no {name}; name a function or class in it that makes the model")
    arguments = {key: parse_set(value) for key, value in sets.items()}
    title = f"{name or 'build_model'}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
    if not callable(maker):
        raise Problem(
            f"{path}: {name or 'build_model'} is {_kind(maker)}, but must be a function or class that makes the model"
        )
    with user_code(path, f"{title} raised"):
        module = build_weightless(lambda: maker(**arguments)) if not _is_module(maker) else maker
    if not _is_module(module):
        raise Problem(f"{path}: {title} returned {_kind(module)}, but must return a torch.nn.Module")
    module = getattr(module, "_orig_mod", module)  # torch.compile changes no byte that we count
    module.train()
    notes: list[str] = []
    sample_batch = getattr(namespace, "sample_batch", None)
    if sample_batch is None:
        notes.append(
            f"{path} has no sample_batch(micro_batch, seq_len=None): only parameters, gradients and optimizer state are "
            "counted; add one that returns the model's inputs for activations, FLOPs and time"
        )
    return ModelSubject(
        source=f"{path}:{name}" if name else str(path),
        kind="file",
        notes=tuple(notes),
        seq_len=seq_len,
        module=module,
        sample_batch=_adapted(path, sample_batch) if sample_batch is not None else None,
        loss=getattr(namespace, "loss", None),
        file=path,
    )


def _import(path: Path) -> Any:
    name = f"dsplan_model_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look here
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


def _adapted(path: Path, sample_batch: Any) -> Callable[[int, int | None], tuple[Any, ...] | dict[str, Any]]:
    """sample_batch with its answer checked. seq_len is passed only where it is given and taken."""
    takes_seq_len = False
    with contextlib.suppress(TypeError, ValueError):
        takes_seq_len = "seq_len" in inspect.signature(sample_batch).parameters

    def adapted(micro_batch: int, seq_len: int | None) -> tuple[Any, ...] | dict[str, Any]:
        if seq_len is not None and not takes_seq_len:
            raise Problem(
                f"--seq-len is given, but sample_batch of {path} takes no seq_len; add the parameter seq_len=None"
            )
        with user_code(path, f"sample_batch({micro_batch}) raised"):
            batch = sample_batch(micro_batch, seq_len=seq_len) if takes_seq_len else sample_batch(micro_batch)
        import torch
        from torch.utils._pytree import tree_leaves

        if not isinstance(batch, (tuple, dict)) or not any(
            isinstance(leaf, torch.Tensor) for leaf in tree_leaves(batch)
        ):
            raise Problem(
                f"{path}: sample_batch returned {_kind(batch)}, but must return a tuple of the model's positional inputs "
                "or a dict of its keyword inputs, with at least one tensor: return (tokens,)"
            )
        return batch

    return adapted


@contextlib.contextmanager
def user_code(path: Path | None, what: str) -> Iterator[None]:
    """Run the user's code: what it prints goes to stderr, what it raises becomes a Problem that names file and line."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except Problem:
        raise
    except (Exception, SystemExit) as error:
        where, text = blame(error, path or Path("the model"))
        raise Problem(f"{where}: {what} {reason(error)}; correct it and run again", user_traceback=text) from error


def reason(error: BaseException) -> str:
    """An exception in one line: "ValueError: heads must divide width"."""
    text = " ".join(str(error).split()).rstrip(".:")
    return f"{type(error).__name__}: {textwrap.shorten(text, 300) or 'no message'}"


def blame(error: BaseException, path: Path) -> tuple[str, str]:
    """("file:line", the traceback from the user's first frame to where our instruments begin)."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [index for index, frame in enumerate(frames) if Path(frame.filename).resolve() == path.resolve()]
    ours = [index for index, frame in enumerate(frames) if Path(frame.filename).parent == Path(__file__).parent]
    not_ours = [
        index for index, frame in enumerate(frames) if index not in ours and frame.filename != contextlib.__file__
    ]
    first = own[0] if own else not_ours[0] if not_ours else 0
    last = next((index for index in ours if index > first), len(frames))
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(frames[first:last])]
    lines += traceback.format_exception_only(type(error), error)
    return f"{path}:{frames[own[-1]].lineno}" if own else str(path), "".join(lines)


def _is_module(value: Any) -> bool:
    from torch import nn

    return isinstance(value, nn.Module)


def _kind(value: Any) -> str:
    """A value as a message says it: "None", "a list", "a Tensor"."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def read_json(path: Path) -> Any:
    """The JSON of a file. Problem where it cannot be read, with the line."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise Problem(f"{path}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise Problem(f"{path}: cannot be read: {error}") from error
