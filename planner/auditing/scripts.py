"""What a training script says, by its text alone: it is parsed, never run."""

from __future__ import annotations

import ast
import warnings
from pathlib import Path

_HANDED = {
    "initialize": ("config", "config_params"),
    "TrainingArguments": ("deepspeed",),
    "DeepSpeedPlugin": ("hf_ds_config",),
}
"""Calls that are given a DeepSpeed configuration, and the arguments that hold it."""
_OPTIMIZERS = ("torch.optim.", "deepspeed.ops.", "apex.optimizers.", "bitsandbytes.optim.")
"""Where the classes of optimizers are known to come from; what another function returns is not known."""


def config_in(program: str) -> str | None:
    """The configuration that the script hands over: a file's name, or SCRIPT#NAME for a dict literal in it."""
    tree = _tree(program)
    if tree is None:
        return None
    for call in _calls(tree):
        for keyword in call.keywords:
            if keyword.arg in _HANDED.get(_name(call.func).rpartition(".")[2], ()):
                value = _assigned(tree, keyword.value)
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    return value.value
                if isinstance(value, ast.Dict) and isinstance(keyword.value, ast.Name):
                    return f"{program}#{keyword.value.id}"
    return None


def client_optimizer(program: str) -> str | None:
    """The class of the optimizer that the script makes itself, as torch.optim.AdamW; None where it makes none that is known.

    What `initialize` is given as optimizer=; in a file that calls no `initialize`, any optimizer of torch.optim.
    """
    tree = _tree(program)
    if tree is None:
        return None
    calls = list(_calls(tree))
    starts = [call for call in calls if _name(call.func).rpartition(".")[2] == "initialize"]
    for call in starts:
        for keyword in call.keywords:
            if keyword.arg == "optimizer":
                made = _assigned(tree, keyword.value)
                name = _full(tree, _name(made.func)) if isinstance(made, ast.Call) else ""
                return name if name.startswith(_OPTIMIZERS) else None
    if not starts:
        for call in calls:
            name = _full(tree, _name(call.func))
            if name.startswith("torch.optim.") and "lr_scheduler" not in name:
                return name
    return None


def _tree(program: str) -> ast.Module | None:
    file = Path(program)
    if file.suffix != ".py" or not file.is_file():
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(file.read_text("utf-8"))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _calls(tree: ast.Module) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def _assigned(tree: ast.Module, value: ast.expr) -> ast.expr:
    """What a name was last given, where it is a name; else the expression itself."""
    if isinstance(value, ast.Name):
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and any(
                isinstance(target, ast.Name) and target.id == value.id for target in node.targets
            ):
                value_of = node.value
                if not (isinstance(value_of, ast.Name) and value_of.id == value.id):
                    return value_of
    return value


def _name(function: ast.expr) -> str:
    """torch.optim.AdamW of that expression; empty where it is no dotted name."""
    if isinstance(function, ast.Name):
        return function.id
    if isinstance(function, ast.Attribute):
        inner = _name(function.value)
        return f"{inner}.{function.attr}" if inner else function.attr
    return ""


def _full(tree: ast.Module, name: str) -> str:
    """The name with what its first part was imported as: AdamW is torch.optim.AdamW after from torch.optim import AdamW."""
    first, dot, rest = name.partition(".")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == first:
                    return f"{node.module}.{alias.name}{dot}{rest}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname == first:
                    return f"{alias.name}{dot}{rest}"
    return name
