"""The real runtime, run for two steps on fake tensors in a fake process group: level "rehearsal"."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from dsplan.planner.capturing.capture import ScriptSubject
from dsplan.planner.memory.native_widths import bf16_masters
from dsplan.planner.models.blaming import user_code
from dsplan.planner.models.load import ModelSubject, Subject
from dsplan.planner.models.weightless import fakes, lent_weights, stand_in
from dsplan.planner.rehearsing.fsdp_aids import one_look_at_strides, parts_when_asked
from dsplan.planner.rehearsing.modes import Kernels
from dsplan.planner.rehearsing.optimizers import torch_optimizer
from dsplan.planner.rehearsing.rehearsal import MICRO_BATCHES, Recording, Rehearsal
from dsplan.planner.rehearsing.scripts import rehearse_script
from dsplan.planner.tracing.kernels import OF_ENGINES, NormalValues
from dsplan.planner.tracing.quick_fakes import QuickFakes
from dsplan.planner.tracing.tracer import inputs_of, loss_of, sample
from dsplan.runtime.engine import Engine
from dsplan.runtime.initializing import initialize
from dsplan.runtime.measuring.observing import Observer
from dsplan.runtime.measuring.watching import StepWatch
from dsplan.runtime.optimizing.naming import OWN
from dsplan.schemas.ledger import Ledger
from dsplan.schemas.optimizer import on_shards
from dsplan.schemas.plan import Plan
from dsplan.schemas.problem import Problem


def rehearse(subject: Subject, plan: Plan) -> Ledger:
    """The ledger of `rehearsal`."""
    return rehearsal(subject, plan).ledger


def rehearsal(subject: Subject, plan: Plan) -> Rehearsal:
    """Rank 0 over the second step of the plan's engine, without weights, GPU or network.

    The process must have no process group; while it rehearses it has a fake one of plan.layout.ranks. Where accumulation
    is larger than MICRO_BATCHES the ledger names no collectives. Problem for what no rehearsal covers yet.
    """
    _refuse(subject, plan)
    if isinstance(subject, ScriptSubject):
        return rehearse_script(subject, plan)
    assert isinstance(subject, ModelSubject)
    try:
        model = copy.deepcopy(subject.module)
    except Exception as error:
        raise Problem(
            f"{subject.source}: the model cannot be copied for a rehearsal ({error}); the formula stands"
        ) from error
    accumulation = min(plan.accumulation, MICRO_BATCHES)
    mode = QuickFakes(allow_non_fake_inputs=True)
    stand = fakes(mode, torch.float32)
    with fake_ranks(plan.layout.ranks), lent_weights(model, stand), contextlib.redirect_stderr(io.StringIO()):
        batch = stand_in(sample(subject, plan.micro_batch, plan.seq_len), stand)
        inputs = inputs_of(batch)
        with user_code(subject.file, "the model raised"), mode, NormalValues(OF_ENGINES), Kernels():
            config, spec = config_of(plan, accumulation), on_shards(plan.optimizer)
            if spec.name in OWN and spec.state_dtype == "fp32":
                config["optimizer"] = {"type": spec.name, "params": {"lr": 1e-3}}
                engine, *_ = initialize(model=model, config=config)
            else:
                engine, *_ = initialize(model=model, optimizer=torch_optimizer(spec), config=config)
            observer = SecondStep(engine)
            engine.observers.append(observer)
            for _ in range(2 * accumulation):
                output = inputs.feed(engine)
                loss, _ = loss_of(subject, output, batch)
                del output  # as in a loop that keeps its batch and its loss
                engine.backward(loss)
                engine.step()
            return observer.rehearsal(counted=accumulation == plan.accumulation)


def _refuse(subject: Subject, plan: Plan) -> None:
    stands = "; the formula stands"
    if plan.engine != "native":
        raise Problem(f"rehearsal of engine {plan.engine} is not available yet{stands}")
    if isinstance(subject, ModelSubject) and subject.sample_batch is None:
        raise Problem(
            f"{subject.source}: rehearsal needs a batch; add sample_batch(micro_batch, seq_len) to the model file"
        )
    layout = plan.layout
    for name in ("tp", "pp", "sp", "dp_replicate"):
        if getattr(layout, name) > 1:
            raise Problem(f"rehearsal with {name} {getattr(layout, name)} is not available yet{stands}")
    if dist.is_initialized():
        raise Problem("rehearsal needs a process without a process group; call it before init_process_group")


@contextlib.contextmanager
def fake_ranks(ranks: int) -> Iterator[None]:
    """A process group of that size in which this process is rank 0 and nothing is ever sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.distributed_c10d.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        with parts_when_asked(), one_look_at_strides():
            yield
    finally:
        dist.destroy_process_group()


def config_of(plan: Plan, accumulation: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": plan.zero_stage, **offload_blocks(plan)},
        "dsplan": {"recompute": plan.recompute},
    }
    knobs = plan.knobs
    if plan.precision != "fp32":
        config[plan.precision] = {"enabled": True}
    if bf16_masters(plan):
        config["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    if knobs.grad_accum_dtype is not None:
        config["data_types"] = {"grad_accum_dtype": knobs.grad_accum_dtype}
    if knobs.communication_dtype is not None:
        config["communication_data_type"] = knobs.communication_dtype
    return config


def offload_blocks(plan: Plan) -> dict[str, Any]:
    blocks: dict[str, Any] = {"none": {}, "optimizer": {"offload_optimizer": {}}, "param": {"offload_param": {}}}[
        plan.offload
    ]
    for block in blocks.values():
        block["device"] = "cpu"
    if plan.offload == "optimizer":
        blocks["offload_optimizer"]["ratio"] = plan.knobs.offload_ratio
    return blocks


class SecondStep(Observer):
    """Observer of an engine that watches its second step, which has its states from the start."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._watch: StepWatch | None = None
        self.ledger: Ledger | None = None
        self.recording = Recording()

    def forward_begins(self, inputs: list[torch.Tensor]) -> None:
        if self._watch is None and self._engine.global_steps == 1:
            self._watch = StepWatch(self._engine)
            self._watch.start()
            tracker = self._watch.tracker
            for key, num_bytes in tracker.held():
                self.recording.hold(key, num_bytes)
            tracker.on_change = self.recording.change
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
            self._watch.tracker.on_change = None
            self._watch.stop()
            self.ledger = self._watch.ledger("rehearsal")

    def rehearsal(self, *, counted: bool) -> Rehearsal:
        """After the second step. counted: its collectives are those of a whole step."""
        assert self.ledger is not None
        book = self.ledger if counted else replace(self.ledger, collectives=())
        return Rehearsal(ledger=book, events=tuple(self.recording.events), resident=self.recording.resident)
