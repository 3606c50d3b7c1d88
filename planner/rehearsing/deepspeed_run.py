"""Real DeepSpeed, run for two steps on fake tensors in a fake process group."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from dsplan.planner.models.blaming import user_code
from dsplan.planner.models.load import ModelSubject
from dsplan.planner.models.weightless import fakes, lent_weights, stand_in
from dsplan.planner.rehearsing.deepspeed_aids import GPU, Shortcuts, deepspeed_on_fake_ranks
from dsplan.planner.rehearsing.deepspeed_config import accumulation_of, client_optimizer, config_of
from dsplan.planner.rehearsing.deepspeed_watch import DeepSpeedWatch
from dsplan.planner.rehearsing.modes import Kernels
from dsplan.planner.rehearsing.rehearsal import Rehearsal
from dsplan.planner.tracing.quick_fakes import QuickFakes
from dsplan.planner.tracing.tracer import inputs_of, loss_of, sample
from dsplan.runtime.recompute import apply_recompute
from dsplan.schemas.plan import Plan
from dsplan.schemas.problem import Problem

STEPS = 2
"""The first step makes the states and, at stage 3, records the order of parameters; the second prefetches by it and is watched.

Its bytes are the third's, and those of real runs' third steps (tests/oracle/deepspeed_bytes.json)."""


@contextlib.contextmanager
def own_linear() -> Iterator[None]:
    """DeepSpeed replaces torch's linear for good (memory_efficient_linear): the next rehearsal begins with torch's again."""
    own = torch.nn.functional.linear
    try:
        yield
    finally:
        torch.nn.functional.linear = own


def run(subject: ModelSubject, plan: Plan, config: Mapping[str, Any] | None = None) -> Rehearsal:
    """The last of STEPS optimizer steps of rank 0. config: the user's own DeepSpeed configuration, over which the plan is laid.

    The process must have no process group, and DS_ACCELERATOR must not have chosen another accelerator before.
    """
    try:
        model = copy.deepcopy(subject.module)
    except Exception as error:
        raise Problem(
            f"{subject.source}: the model cannot be copied for a rehearsal ({error}); the formula stands"
        ) from error
    accumulation = accumulation_of(plan)
    mode = QuickFakes(allow_non_fake_inputs=True)
    stand = fakes(mode, torch.float32, str(GPU))
    watch = DeepSpeedWatch()
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        deepspeed_on_fake_ranks(plan.layout.ranks) as deepspeed,
        lent_weights(model, stand),
        user_code(subject.file, "the model raised"),
        mode,
        watch.tracker,
        Shortcuts(),
        Kernels(),
        own_linear(),
    ):
        for tensor in [*model.parameters(), *model.buffers()]:
            watch.tracker.add(tensor.detach(), "params")
        apply_recompute(model, plan.recompute)
        with deepspeeds(deepspeed, "initialize()"):
            engine, *_ = deepspeed.initialize(
                model=model,
                optimizer=client_optimizer(plan, config, model),
                model_parameters=[param for param in model.parameters() if param.requires_grad],
                config=config_of(plan, config, accumulation),
                dist_init_required=False,
            )
        watch.follow(engine)
        batch = stand_in(sample(subject, plan.micro_batch, plan.seq_len), stand)
        inputs = inputs_of(batch)
        for tensor in inputs.tensors:
            watch.tracker.relabel(tensor, "activations")
        for step in range(STEPS):
            if step == STEPS - 1:
                watch.begin()
            for _ in range(accumulation):
                watch.enter("forward")
                with torch.device(GPU):
                    output = inputs.feed(engine)
                    loss, _notes = loss_of(subject, output, batch)
                del output  # as in a loop that keeps its batch and its loss
                watch.enter("backward")
                with deepspeeds(deepspeed, "backward()"):
                    engine.backward(loss)
                watch.enter("step")
                with deepspeeds(deepspeed, "step()"):
                    engine.step()
            del loss
        watch.end()
        engine.destroy()
        return watch.rehearsal(
            counted=plan.layout.ranks > 1 and accumulation == plan.accumulation, offloads=plan.offload != "none"
        )


@contextlib.contextmanager
def deepspeeds(deepspeed: Any, where: str) -> Iterator[None]:
    """What DeepSpeed itself raises is not the model's fault: it refuses the plan, or does not run on fake tensors."""
    try:
        yield
    except Problem:
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise Problem(
            f"DeepSpeed {deepspeed.__version__} raised in {where}: {type(error).__name__}: {text}; the formula stands"
        ) from error
