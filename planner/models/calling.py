"""What a model file offers, checked by its signatures before it is called: build_model, sample_batch, loss, forward."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dsplan.planner.models.blaming import user_code
from dsplan.schemas.problem import Problem

SampleBatch = Callable[[int, "int | None"], "tuple[Any, ...] | dict[str, Any]"]


def check_call(path: Path, name: str, maker: Any, arguments: Mapping[str, Any]) -> None:
    """Problem where `maker(**arguments)` lacks an argument or gives one that it does not take."""
    parameters = _parameters(maker)
    if parameters is None:
        return
    where = _where(path, name)
    by_name = [item for item in parameters if item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY)]
    takes_any = any(item.kind is item.VAR_KEYWORD for item in parameters)
    unknown = next((key for key in arguments if key not in [item.name for item in by_name]), None)
    if unknown is not None and not takes_any:
        known = ", ".join(item.name for item in by_name) or "no arguments"
        raise Problem(f"{where}: {name} takes no {unknown}; it takes {known}")
    unnamed = next((item for item in parameters if item.kind is item.POSITIONAL_ONLY and _needed(item)), None)
    if unnamed is not None:
        raise Problem(
            f"{where}: {name} takes {unnamed.name} by position alone, which --set cannot give; drop the / there"
        )
    missing = [item.name for item in by_name if _needed(item) and item.name not in arguments]
    if missing:
        remedy = " ".join(f"--set {key}=..." for key in missing)
        raise Problem(f"{where}: {name} needs {_listed(missing)}; pass {remedy}")


def check_loss(path: Path, loss: Any) -> None:
    """Problem where `loss(output, batch)` cannot be called."""
    if not callable(loss):
        raise Problem(f"{path}: loss is {kind_of(loss)}, but must be a function loss(output, batch)")
    if not _accepts(loss, 2):
        raise Problem(
            f"{_where(path, 'loss')}: loss takes {_signature(loss)}, but is called with the model's output and the batch; "
            "write def loss(output, batch)"
        )


def checked_sample_batch(path: Path, sample_batch: Any) -> SampleBatch:
    """sample_batch with its answer checked. seq_len is passed only where it is given and taken."""
    wanted = "def sample_batch(micro_batch, seq_len=None)"
    if not callable(sample_batch):
        raise Problem(f"{path}: sample_batch is {kind_of(sample_batch)}, but must be a function: {wanted}")
    parameters = _parameters(sample_batch)
    takes_seq_len = any(item.name == "seq_len" for item in parameters or ())
    if not _accepts(sample_batch, 1, ("seq_len",) if takes_seq_len else ()):
        raise Problem(
            f"{_where(path, 'sample_batch')}: sample_batch takes {_signature(sample_batch)}, but is called with "
            f"{'micro_batch and seq_len' if takes_seq_len else 'micro_batch'}; write {wanted}"
        )

    def checked(micro_batch: int, seq_len: int | None) -> tuple[Any, ...] | dict[str, Any]:
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
                f"{path}: sample_batch returned {kind_of(batch)}, but must return a tuple of the model's positional inputs "
                "or a dict of its keyword inputs, with at least one tensor: return (tokens,)"
            )
        if all(leaf.numel() == 0 for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)):
            raise Problem(
                f"{_where(path, 'sample_batch')}: sample_batch({micro_batch}) returned tensors without elements, of which no "
                "bytes and no FLOPs come; return micro_batch rows"
            )
        if isinstance(batch, dict):
            for key in batch:
                if not isinstance(key, str):
                    raise Problem(
                        f"{_where(path, 'sample_batch')}: sample_batch returned a dict with the key {key!r}, but its keys "
                        'must be the names of the model\'s inputs: return {"x": ...}, or a tuple for inputs by position'
                    )
        return batch

    return checked


def check_inputs(path: Path | None, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Problem where the model's forward does not take what sample_batch returns."""
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        given = (
            _listed(list(kwargs)) if kwargs else f"{len(args)} inputs by position" if len(args) != 1 else "one input"
        )
        raise Problem(
            f"{path or 'the model'}: sample_batch gives {given}, but {type(module).__name__}.forward takes "
            f"{_signature(module.forward)}: {error}"
        ) from error


def _needed(item: inspect.Parameter) -> bool:
    return item.default is item.empty and item.kind not in (item.VAR_POSITIONAL, item.VAR_KEYWORD)


def _parameters(function: Any) -> list[inspect.Parameter] | None:
    """None: they cannot be told."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None


def _signature(function: Any) -> str:
    names = [str(item) for item in _parameters(function) or ()]
    return f"({', '.join(names)})" if names else "no arguments"


def _accepts(function: Any, positional: int, keywords: tuple[str, ...] = ()) -> bool:
    if _parameters(function) is None:
        return True
    try:
        inspect.signature(function).bind(*range(positional), **dict.fromkeys(keywords))
    except TypeError:
        return False
    return True


def _where(path: Path, name: str) -> str:
    """ "model.py:3": the line on which the file defines or imports the name; of a class, its __init__."""
    try:
        body = ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError, OSError):
        return str(path)
    line = next((line for node in reversed(body) for line in _lines(node, name)), None)
    return f"{path}:{line}" if line else str(path)


def _lines(node: ast.stmt, name: str) -> Iterator[int]:
    if isinstance(node, ast.ClassDef) and node.name == name:
        yield from (line for member in node.body for line in _lines(member, "__init__"))
        yield node.lineno
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
        yield node.lineno
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        if any((alias.asname or alias.name) == name for alias in node.names):
            yield node.lineno
    elif isinstance(node, ast.Assign) and any(isinstance(at, ast.Name) and at.id == name for at in node.targets):
        yield node.lineno


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def kind_of(value: Any) -> str:
    """A value as a message says it: "None", "a list", "a Tensor"."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
