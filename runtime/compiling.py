"""torch.compile, block by block: what FSDP2 does between blocks stays outside the graphs."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
from dsplan.runtime.sharding.blocks import find_blocks
from dsplan.schemas.problem import Problem
from torch import nn

RECOMPILES_PER_BLOCK = 4
"""Training, evaluation, and a size that then counts as dynamic, with one to spare: blocks may share their code, and beyond
torch's limit (8 for all of them) a block would silently run uncompiled."""


def compile_blocks(model: nn.Module, options: Mapping[str, Any]) -> int:
    """Compile the forward of each block in place, or of the whole model where it has none; the number compiled.

    Names of modules and parameters stay. Compiling itself happens at the first forward; where it fails there is a Problem.
    options: torch.compile's (backend, mode, fullgraph, dynamic, options).
    """
    blocks = find_blocks(model) or [("the model", model)]
    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.config.recompile_limit = max(limit, RECOMPILES_PER_BLOCK * len(blocks))
    for name, block in blocks:
        block.forward = _compiled(name, block.forward, options)
    return len(blocks)


def _compiled(name: str, forward: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    try:
        fast = torch.compile(forward, **options)
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        raise _failed("the options of torch.compile", error, options) from error

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return fast(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            raise _failed(name, error, options) from error

    return wrapped


def _failed(what: str, error: Exception, options: Mapping[str, Any]) -> Problem:
    cause = error.__cause__ or getattr(error, "inner_exception", None) or error
    reason = next((line.strip() for line in str(cause).splitlines() if line.strip()), "")
    return Problem(
        f"torch.compile fails at {what}, backend {options.get('backend', 'inductor')} ({type(cause).__name__}: {reason}); "
        'train without it by leaving out engine.compile() and "dsplan": {"compile": ...}, or try {"backend": "aot_eager"}, '
        "which needs no C++ compiler",
        user_traceback="".join(traceback.format_exception(error)),
    )
