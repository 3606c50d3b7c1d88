"""The real runtime, run for two steps on fake tensors in a fake process group: level "rehearsal"."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from dsplan.planner.models.blaming import user_code
from dsplan.planner.models.load import ModelSubject, Subject
from dsplan.planner.models.weightless import fakes, lent_weights, stand_in
from dsplan.planner.tracing.kernels import GpuKernels
from dsplan.planner.tracing.tracer import inputs_of, loss_of, sample
from dsplan.runtime.engine import Engine
from dsplan.runtime.initializing import initialize
from dsplan.runtime.watching import StepWatch
from dsplan.schemas.choices import OptimizerSpec
from dsplan.schemas.ledger import Ledger
from dsplan.schemas.plan import Plan
from dsplan.schemas.problem import Problem
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import _engine_run_backward
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

MICRO_BATCHES = 3
"""A first, a middle and a last micro-batch: bytes do not depend on how many there are in between."""


def rehearse(subject: Subject, plan: Plan) -> Ledger:
    """The ledger of rank 0 over the second step of the plan's engine, without weights, GPU or network.

    The process must have no process group; while it rehearses it has a fake one of plan.layout.ranks. Where accumulation
    is larger than MICRO_BATCHES the ledger names no collectives. Problem for what no rehearsal covers yet.
    """
    _refuse(subject, plan)
    assert isinstance(subject, ModelSubject)
    try:
        model = copy.deepcopy(subject.module)
    except Exception as error:
        raise Problem(
            f"{subject.source}: the model cannot be copied for a rehearsal ({error}); the formula stands"
        ) from error
    accumulation = min(plan.accumulation, MICRO_BATCHES)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    stand = fakes(mode, torch.float32)
    with _fake_ranks(plan.layout.ranks), lent_weights(model, stand), contextlib.redirect_stderr(io.StringIO()):
        batch = stand_in(sample(subject, plan.micro_batch, plan.seq_len), stand)
        inputs = inputs_of(batch)
        with user_code(subject.file, "the model raised"), mode, _Answers(), _Kernels():  # type: ignore[no-untyped-call]
            engine, *_ = initialize(
                model=model, optimizer=_optimizer(plan.optimizer), config=_config(plan, accumulation)
            )
            observer = engine.observer = _SecondStep(engine)
            for _ in range(2 * accumulation):
                output = inputs.feed(engine)
                loss, _ = loss_of(subject, output, batch)
                del output  # as in a loop that keeps its batch and its loss
                engine.backward(loss)
                engine.step()
            assert observer.ledger is not None
            return observer.ledger if accumulation == plan.accumulation else replace(observer.ledger, collectives=())


def _refuse(subject: Subject, plan: Plan) -> None:
    stands = "; the formula stands"
    if plan.engine != "native":
        raise Problem(f"rehearsal of engine {plan.engine} is not available yet{stands}")
    if not isinstance(subject, ModelSubject):
        raise Problem(f"{subject.source}: rehearsal of a script is not available yet; give a model file{stands}")
    if subject.sample_batch is None:
        raise Problem(
            f"{subject.source}: rehearsal needs a batch; add sample_batch(micro_batch, seq_len) to the model file"
        )
    layout = plan.layout
    for name in ("tp", "pp", "sp", "dp_replicate"):
        if getattr(layout, name) > 1:
            raise Problem(f"rehearsal with {name} {getattr(layout, name)} is not available yet{stands}")
    if plan.offload != "none":
        raise Problem(f"rehearsal with offload {plan.offload} is not available yet{stands}")
    if dist.is_initialized():
        raise Problem("rehearsal needs a process without a process group; call it before init_process_group")


@contextlib.contextmanager
def _fake_ranks(ranks: int) -> Iterator[None]:
    """A process group of that size in which this process is rank 0 and nothing is ever sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _config(plan: Plan, accumulation: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": plan.zero_stage},
        "dsplan": {"recompute": plan.recompute},
    }
    if plan.precision != "fp32":
        config[plan.precision] = {"enabled": True}
    return config


def _optimizer(spec: OptimizerSpec) -> Callable[[Any], Optimizer]:
    """The optimizer over whatever parameters the engine comes to hold. lr and the like do not change bytes."""
    kinds: dict[str, Callable[..., Optimizer]] = {
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "adagrad": torch.optim.Adagrad,
        "sgd": torch.optim.SGD,
    }
    if spec.name not in kinds:
        raise Problem(f"rehearsal with optimizer {spec.name} is not available yet; the formula stands")
    options: dict[str, Any] = {"lr": 1e-3, "foreach": spec.kernel == "foreach"}
    if spec.kernel == "fused":
        options = {"lr": 1e-3, "fused": True}
    if spec.name == "sgd" and spec.momentum:
        options["momentum"] = 0.9
    return lambda params: kinds[spec.name](params, **options)


class _SecondStep:
    """Observer of an engine that watches its second step, which has its states from the start."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._watch: StepWatch | None = None
        self.ledger: Ledger | None = None

    def forward_begins(self, inputs: list[torch.Tensor]) -> None:
        if self._watch is None and self._engine.global_steps == 1:
            self._watch = StepWatch(self._engine)
            self._watch.start()
        if self._watch is not None:
            self._watch.forward_begins(inputs)

    def backward_begins(self) -> None:
        if self._watch is not None:
            self._watch.backward_begins()

    def step_begins(self) -> None:
        if self._watch is not None:
            self._watch.step_begins()

    def step_ends(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            self.ledger = self._watch.ledger("rehearsal")


class _Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives `.item()` a normal step's value: a finite norm, no overflow."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func is torch.ops.aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return 1.0 if dtype.is_floating_point else False if dtype is torch.bool else 0
        return func(*args, **(kwargs or {}))


class _Kernels(GpuKernels):
    """GpuKernels that stays on while backward computes blocks again: Tensor.backward would switch it off."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.backward:
            return super().__torch_function__(func, types, args, kwargs)
        with self:
            loss = args[0]
            gradient = torch.ones_like(loss)
            keep = bool((kwargs or {}).get("retain_graph"))
            return _engine_run_backward(
                (loss,), (gradient,), keep, False, (), allow_unreachable=True, accumulate_grad=True
            )
