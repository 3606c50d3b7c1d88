"""loss.backward() in place of engine.backward(loss): hooks on what the engine's forward has given out see it coming.

Source: deepspeed/runtime/engine.py, scale, _backward_prologue and _backward_post_hook (0.19.8), which takes it at stages 1 to 3.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from dsplan.runtime.losses import NO_OPTIMIZER, refuse_loss, refuse_nan_loss
from dsplan.schemas.problem import Problem
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from dsplan.runtime.engine import Engine


class PlainBackward:
    """Mixed into Engine: a backward that the script begins itself counts as the engine's own."""

    _engine_backwards: ClassVar[int] = 0
    """How many of any engine are running: they divide and scale the loss itself, also for the engines that they pass through."""
    _stop_on_nan_loss: bool
    _given_to_scale: torch.Tensor | None = None
    """The loss whose backward is to come."""
    _seen_task: int = -1
    """Autograd's number of the last backward that the script began."""

    _kept_gathered: bool = False

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale, for engine.scale(loss).backward(). It is divided by accumulation as it goes back."""
        engine = cast("Engine", self)
        refuse_loss(loss, {})
        if engine.optimizer is None:
            raise Problem(NO_OPTIMIZER)
        if self._stop_on_nan_loss:
            refuse_nan_loss(loss, engine.global_steps)
        self._given_to_scale = loss.detach()
        return loss if engine.scaler is None else loss.float() * engine.scaler.value

    @contextlib.contextmanager
    def _own_backward(self) -> Iterator[None]:
        PlainBackward._engine_backwards += 1
        try:
            yield
        finally:
            PlainBackward._engine_backwards -= 1

    def _watch(self, output: Any, *, chained: bool) -> None:
        """Be told of each gradient that reaches this output. chained: it will go on to what the input was computed with."""
        hook = functools.partial(self._gradient_arrives, chained)
        for tensor in _tensors_of(output) if cast("Engine", self).optimizer is not None else ():
            if tensor.grad_fn is not None:
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def _gradient_arrives(self, chained: bool, gradient: torch.Tensor) -> torch.Tensor | None:
        engine = cast("Engine", self)
        if self._engine_backwards:
            return None
        if not self._fills_gradients():
            self._keep_gathered(True)  # for the backward of what is computed with this gradient
            return None
        task = torch._C._current_graph_task_id()
        if task != self._seen_task:
            self._seen_task = task
            self._begin_plain_backward()
        accumulation = engine.gradient_accumulation_steps()
        if accumulation == 1:
            return None
        if chained:
            raise Problem(
                "loss.backward() goes through a forward whose input was computed with gradients, so that what lies before it "
                f"would be divided by accumulation {accumulation} twice; call engine.backward(loss)"
            )
        return gradient / accumulation

    def _keep_gathered(self, keep: bool) -> None:
        if keep is not self._kept_gathered:
            self._kept_gathered = keep
            for unit in cast("Engine", self).units:
                unit.set_reshard_after_backward(not keep, recurse=False)

    def _fills_gradients(self) -> bool:
        """Not so in torch.autograd.grad(...), which only passes through."""
        sharded = cast("Engine", self).sharded
        gathered = (held._unsharded_param for held in sharded.held() if hasattr(held, "_unsharded_param"))
        return any(
            _is_reached(leaf) for leaf in itertools.chain(gathered, sharded.scalars.held()) if leaf.requires_grad
        )

    def _begin_plain_backward(self) -> None:
        engine = cast("Engine", self)
        loss, self._given_to_scale = self._given_to_scale, None
        if loss is None and (engine.scaler is not None or self._stop_on_nan_loss):
            why = "dsplan.stop_on_nan_loss is true" if engine.scaler is None else "this precision scales the loss"
            raise Problem(
                f"loss.backward() is called, but {why}; call engine.backward(loss), or engine.scale(loss).backward()"
            )
        boundary = engine.begin_backward()
        unknown = torch.full((), float("nan"), device=engine.device)
        Variable._execution_engine.queue_callback(
            functools.partial(engine.end_backward, boundary, unknown if loss is None else loss)
        )


def _is_reached(parameter: torch.Tensor) -> bool:
    """Whether the backward that is running puts a gradient into this leaf."""
    return torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)


def _tensors_of(output: Any) -> Iterator[torch.Tensor]:
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _tensors_of([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
