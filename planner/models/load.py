"""The MODEL argument: told apart without running anything, then loaded without materialising a weight."""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dsplan.planner.capturing.standing import stand_ins
from dsplan.planner.models.adapting import AS_IT_IS, Adapting, check_model_file, check_script
from dsplan.planner.models.blaming import user_code
from dsplan.planner.models.calling import check_call, check_loss, checked_sample_batch, kind_of
from dsplan.schemas.choices import Built, OptimizerSpec
from dsplan.schemas.problem import Problem

if TYPE_CHECKING:
    import torch
    from dsplan.planner.tracing.flops import Flops
    from dsplan.planner.tracing.repeating import Run
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
    built: Built = "host"
    """Where the script makes the model at stage 3: "meta" under zero.Init, shard by shard."""
    hidden_size: int | None = None
    """Of a HF config: what Trainer fills some "auto" sizes by."""
    arguments: dict[str, Any] | None = field(default=None, repr=False)
    """Of the load_subject that made it, for another process to do the same; None: it was made otherwise."""
    traces: dict[Any, Trace] = field(default_factory=dict, repr=False)


@dataclass(kw_only=True)
class ModelSubject(Subject):
    """A model that is built here: `module` lies on device meta. Without `sample_batch` only its state is known."""

    module: nn.Module = field(repr=False)
    sample_batch: Callable[[int, int | None], tuple[Any, ...] | dict[str, Any]] | None = field(default=None, repr=False)
    loss: Callable[[Any, Any], torch.Tensor] | None = field(default=None, repr=False)
    file: Path | None = None
    flops: dict[Any, Flops] = field(default_factory=dict, repr=False)
    recordings: dict[Any, dict[Any, Any]] = field(default_factory=dict, repr=False)
    """What was traced, by dtype and recompute, then by micro_batch and length: others are derived from it."""
    runs: list[Run] | None = field(default=None, repr=False)
    """Its stretches of equal blocks; None: not looked for yet."""


def load_subject(
    model: str,
    *,
    sets: Mapping[str, str] | None = None,
    seq_len: int | None = None,
    script_args: Sequence[str] = (),
    trace_timeout_seconds: float = TRACE_TIMEOUT_SECONDS,
    adapting: Adapting = AS_IT_IS,
) -> Subject:
    """The subject that MODEL names. Problem where it cannot be had, in one line with the remedy."""
    subject = _load(model, sets, seq_len, script_args, trace_timeout_seconds, adapting)
    _without_packing()
    subject.arguments = {
        "model": model,
        "sets": dict(sets or {}),
        "seq_len": seq_len,
        "script_args": tuple(script_args),
        "trace_timeout_seconds": trace_timeout_seconds,
        "adapting": adapting,
    }
    return subject


def _without_packing() -> None:
    if "transformers.masking_utils" not in sys.modules:
        return
    from dsplan.planner.models.one_sequence import one_sequence_a_row

    one_sequence_a_row()


def _load(
    model: str,
    sets: Mapping[str, str] | None,
    seq_len: int | None,
    script_args: Sequence[str],
    trace_timeout_seconds: float,
    adapting: Adapting,
) -> Subject:
    kind, path, name = told_apart(model)
    if kind != "file" and sets:
        raise Problem(f"--set {next(iter(sets))}=... goes to build_model() of a model file, but {model} has none")
    if kind != "script" and script_args:
        instead = "use --set name=value" if kind == "file" else "leave them out"
        raise Problem(
            f"arguments after -- ({script_args[0]} ...) go to a training script, but {model} is a "
            f"{'model file' if kind == 'file' else 'Hugging Face config'}; {instead}"
        )
    if kind == "hf":
        from dsplan.planner.models.hf import load_hf

        return load_hf(model, path, seq_len, adapting)
    if kind == "script":
        from dsplan.planner.capturing.capture import ScriptSubject

        check_script(model, adapting)
        if seq_len is not None:
            raise Problem(
                f"--seq-len is given, but {model} is a script, which feeds sequences of its own length; pass its own option after --"
            )
        return ScriptSubject(path, script_args, trace_timeout_seconds)
    check_model_file(model, adapting)
    with stand_ins() as stood_in:
        subject = _load_file(path, name, sets or {}, seq_len, adapting)
    subject.notes = (*subject.notes, *stood_in)
    return subject


def told_apart(model: str) -> tuple[Kind, Path, str | None]:
    """(kind, path, NAME) of a MODEL argument, by its text and the file's text alone. Problem where it is none of them."""
    if not model.strip():
        raise Problem("MODEL is empty; give a model file, a training script or a HF config.json")
    text, colon, name = model.rpartition(":") if ".py:" in model else (model, "", "")
    if colon and not name.strip():
        raise Problem(f"{model} names nothing after the colon; write {text}:NAME, or {text} for its build_model()")
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
    from dsplan.planner.models.hf import cached_config

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


def _load_file(
    path: Path, name: str | None, sets: Mapping[str, str], seq_len: int | None, adapting: Adapting
) -> ModelSubject:
    from dsplan.planner.models.adapted import adapt
    from dsplan.planner.models.pretrained import from_configs
    from dsplan.planner.models.weightless import build_weightless, lazy_names

    _top_level_names(path)  # syntax errors first, with their line
    with from_configs(path) as met, user_code(path, "import raised"):
        namespace = _import(path)
    called = name or "build_model"
    maker = getattr(namespace, called, None)
    if maker is None:
        raise Problem(f"{path} has no {called}; name a function or class in it that makes the model")
    arguments = {key: parse_set(value) for key, value in sets.items()}
    title = f"{called}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
    if not callable(maker):
        raise Problem(f"{path}: {called} is {kind_of(maker)}, but must be a function or class that makes the model")
    if _is_module(maker):
        if sets:
            raise Problem(f"{path}: {called} is a model already, so --set {next(iter(sets))}=... has nowhere to go")
        module = maker
    else:
        check_call(path, called, maker, arguments)
        with from_configs(path) as met, user_code(path, f"{title} raised"):
            module = build_weightless(lambda: maker(**arguments))
    if not _is_module(module):
        raise Problem(f"{path}: {title} returned {kind_of(module)}, but must return a torch.nn.Module")
    module = getattr(module, "_orig_mod", module)  # torch.compile changes no byte that we count
    lazy = lazy_names(module)
    if lazy:
        raise Problem(
            f"{path}: {title} returned a model with lazy parameters, whose sizes are not known: {', '.join(lazy)}; run a "
            "batch through it in build_model(), or give the sizes (nn.Linear(64, 10), not nn.LazyLinear(10))"
        )
    if next(module.parameters(), None) is None:
        raise Problem(f"{path}: {title} returned a {type(module).__name__} without parameters: nothing to train")
    with user_code(path, "train() of the model raised"):
        module.train()
    notes = [*met, *adapt(str(path), module, adapting)]
    sample_batch = getattr(namespace, "sample_batch", None)
    if sample_batch is None:
        notes.append(
            f"{path} has no sample_batch(micro_batch, seq_len=None): only parameters, gradients and optimizer state are "
            "counted; add one that returns the model's inputs for activations, FLOPs and time"
        )
    loss = getattr(namespace, "loss", None)
    if loss is not None:
        check_loss(path, loss)
    return ModelSubject(
        source=f"{path}:{name}" if name else str(path),
        kind="file",
        notes=tuple(notes),
        seq_len=seq_len,
        module=module,
        sample_batch=checked_sample_batch(path, sample_batch) if sample_batch is not None else None,
        loss=loss,
        file=path,
    )


def _import(path: Path) -> Any:
    name = f"dsplan_model_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look here
    spec.loader.exec_module(module)
    return module


def _is_module(value: Any) -> bool:
    from torch import nn

    return isinstance(value, nn.Module)


def read_json(path: Path) -> Any:
    """The JSON of a file. Problem where it cannot be read, with the line."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise Problem(f"{path}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise Problem(f"{path}: cannot be read: {error}") from error
