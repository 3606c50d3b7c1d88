"""The two engines under a script's loop: what begins them on fake tensors, and what watches their second step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from dsplan.planner.capturing.capture_child import take_stand_in_away
from dsplan.planner.capturing.gpuless import GpuAs
from dsplan.planner.models.weightless import Inputs
from dsplan.planner.rehearsing.modes import Kernels
from dsplan.planner.rehearsing.optimizers import torch_optimizer
from dsplan.planner.rehearsing.rehearsal import Rehearsal
from dsplan.planner.rehearsing.scripts import Order
from dsplan.planner.tracing.kernels import OF_ENGINES, NormalValues
from dsplan.schemas.choices import OptimizerSpec
from dsplan.schemas.optimizer import on_shards
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode


def carry_native(
    stack: contextlib.ExitStack,
    mode: FakeTensorMode,
    model: nn.Module,
    client: Any,
    spec: OptimizerSpec | None,
    order: Order,
    accumulation: int,
) -> _Native:
    """Our runtime. client: the script's optimizer object, of which `spec` is what memory knows; it is taken where the plan has the same."""
    from dsplan.planner.rehearsing.native import SecondStep, config_of, fake_ranks
    from dsplan.runtime.initializing import initialize

    plan = order.plan
    for context in (fake_ranks(plan.layout.ranks), mode, NormalValues(OF_ENGINES), Kernels()):
        stack.enter_context(context)
    own = client is not None and spec in (None, plan.optimizer)
    engine, *_ = initialize(
        model=model,
        optimizer=client if own else torch_optimizer(on_shards(plan.optimizer)),
        config=config_of(plan, accumulation),
    )
    observer = SecondStep(engine)
    engine.observers.append(observer)
    return _Native(engine, observer)


class _Native:
    def __init__(self, engine: Any, observer: Any):
        self.engine = engine
        self._observer = observer

    def on_device(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def forward_begins(self, inputs: Inputs) -> None:
        """The observer is told by the engine itself."""

    def backward(self, loss: torch.Tensor) -> None:
        self.engine.backward(loss)

    def step(self) -> None:
        self.engine.step()

    def second_step_begins(self) -> None:
        """The observer counts steps itself."""

    def told(self, counted: bool) -> Rehearsal:
        rehearsal: Rehearsal = self._observer.rehearsal(counted=counted)
        return rehearsal


def carry_deepspeed(
    stack: contextlib.ExitStack,
    mode: FakeTensorMode,
    model: nn.Module,
    client: Any,
    spec: OptimizerSpec | None,
    order: Order,
    accumulation: int,
) -> _DeepSpeed:
    """Real DeepSpeed, in place of the stand-in on which the script was begun."""
    take_stand_in_away()
    from dsplan.planner.rehearsing.deepspeed_aids import GPU, Shortcuts, deepspeed_on_fake_ranks
    from dsplan.planner.rehearsing.deepspeed_config import client_optimizer, config_of
    from dsplan.planner.rehearsing.deepspeed_run import deepspeeds, own_linear
    from dsplan.planner.rehearsing.deepspeed_watch import DeepSpeedWatch
    from dsplan.runtime.recompute import apply_recompute

    plan, watch = order.plan, DeepSpeedWatch()
    deepspeed = stack.enter_context(deepspeed_on_fake_ranks(plan.layout.ranks))
    for context in (mode, watch.tracker, GpuAs(str(GPU)), Shortcuts(), Kernels(), own_linear()):
        stack.enter_context(context)
    for tensor in [*model.parameters(), *model.buffers()]:
        watch.tracker.add(tensor.detach(), "params")
    apply_recompute(model, plan.recompute)
    own = client is not None and spec in (None, plan.optimizer) and not type(client).__module__.startswith("deepspeed")
    with deepspeeds(deepspeed, "initialize()"):
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=client if own else client_optimizer(plan, order.config, model),
            model_parameters=[param for param in model.parameters() if param.requires_grad],
            config=config_of(plan, order.config, accumulation),
            dist_init_required=False,
        )
    watch.follow(engine)
    return _DeepSpeed(deepspeed, engine, watch, order)


class _DeepSpeed:
    def __init__(self, deepspeed: Any, engine: Any, watch: Any, order: Order):
        self.engine = engine
        self._deepspeed = deepspeed
        self._watch = watch
        self._order = order

    def on_device(self) -> contextlib.AbstractContextManager[Any]:
        from dsplan.planner.rehearsing.deepspeed_aids import GPU

        return torch.device(GPU)

    def forward_begins(self, inputs: Inputs) -> None:
        for tensor in inputs.tensors:
            self._watch.tracker.relabel(tensor, "activations")
        self._watch.enter("forward")

    def backward(self, loss: torch.Tensor) -> None:
        self._watch.enter("backward")
        with self._raised_in("backward()"):
            self.engine.backward(loss)

    def step(self) -> None:
        self._watch.enter("step")
        with self._raised_in("step()"):
            self.engine.step()

    def second_step_begins(self) -> None:
        self._watch.tracker.phase = None
        self._watch.begin()

    def told(self, counted: bool) -> Rehearsal:
        plan = self._order.plan
        self._watch.end()
        rehearsal: Rehearsal = self._watch.rehearsal(
            counted=counted and plan.layout.ranks > 1, offloads=plan.offload != "none"
        )
        return rehearsal

    @contextlib.contextmanager
    def _raised_in(self, where: str) -> Iterator[None]:
        from dsplan.planner.rehearsing.deepspeed_run import deepspeeds

        with deepspeeds(self._deepspeed, where):
            yield
