"""Why a loss depends on no trainable parameter: the line of the user's file at which the gradient is lost."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from dsplan.schemas.problem import Problem
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves


def no_gradient(path: Path | None, source: str, model: nn.Module, again: Callable[[], Any]) -> Problem:
    """The Problem of a loss without gradient. again: runs forward and loss once more, to be watched."""
    named = dict(model.named_parameters())
    if named and not any(param.requires_grad for param in named.values()):
        line = _freezing_line(path)
        where = f"{source}:{line}" if line else source
        return Problem(
            f"{where}: no parameter of {type(model).__name__} is trained: requires_grad is False for all {len(named)}, "
            "so there is no gradient; leave one that is trained"
        )
    watch = _Watch(path)
    try:
        with watch:
            again()
    except Exception:
        watch.lost = {}  # what raises without its first run tells nothing
    place, reason = watch.lost.get(True) or watch.lost.get(False) or (f"{source}: ", "")
    reason = reason or "no parameter that is trained takes part in it"
    return Problem(f"{place}the loss depends on no trainable parameter: {reason}; let the gradient through to the loss")


class _Watch(TorchFunctionMode):
    """Notes operations that take what needs a gradient and give tensors that need none.

    lost: by whether the tensor could have one (a float), the last such (place, reason).
    """

    def __init__(self, path: Path | None):
        super().__init__()
        self.lost: dict[bool, tuple[str, str]] = {}
        self._path = path

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        found = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
        if found and not any(leaf.requires_grad for leaf in found):
            taken = tree_leaves((args, kwargs))
            if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in taken):
                place = self._place()
                if place is not None:
                    floats = any(leaf.is_floating_point() for leaf in found)
                    self.lost[floats] = place, self._reason(func, floats)
        return made

    def _reason(self, func: Any, floats: bool) -> str:
        if not torch.is_grad_enabled():
            return "it is computed without gradients here (torch.no_grad, torch.inference_mode)"
        name = getattr(func, "__name__", "an operation")
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", "data")
        return f"{name} ends the gradient here" + ("" if floats else ", since it gives whole numbers")

    def _place(self) -> str | None:
        """ "model.py:12: Net.forward: ", the innermost line of the user's file that runs."""
        frame = inspect.currentframe()
        while frame is not None:
            if self._path is not None and Path(frame.f_code.co_filename).resolve() == self._path.resolve():
                holder = frame.f_locals.get("self")
                inside = f"{type(holder).__name__}." if isinstance(holder, nn.Module) else ""
                return f"{self._path}:{frame.f_lineno}: {inside}{frame.f_code.co_name}: "
            frame = frame.f_back
        return None


def _freezing_line(path: Path | None) -> int | None:
    """The first line of a model file that sets requires_grad."""
    if path is None or path.suffix != ".py":
        return None
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Attribute) and node.attr in ("requires_grad", "requires_grad_"):
            return node.lineno
    return None
