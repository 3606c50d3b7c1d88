"""Engine: DeepSpeed's training loop calls, carried out on FSDP2."""

from __future__ import annotations

import contextlib
import math
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from dsplan.runtime import values
from dsplan.runtime.answers import Answers
from dsplan.runtime.checkpoints.background import Background
from dsplan.runtime.compiling import compile_blocks
from dsplan.runtime.data import Loader
from dsplan.runtime.groups import local_rank, note
from dsplan.runtime.keeping import Keeping
from dsplan.runtime.losses import NO_OPTIMIZER, refuse_loss, refuse_nan_loss
from dsplan.runtime.measuring.observing import Observer
from dsplan.runtime.optimizing.clipping import clip_factor, global_norm, scale_gradients
from dsplan.runtime.optimizing.loss_scale import LossScale
from dsplan.runtime.optimizing.muon import Muon
from dsplan.runtime.optimizing.schedules import advance
from dsplan.runtime.plain_backward import PlainBackward
from dsplan.runtime.sharding.agreement import Doing, open_host_group, refuse_apart
from dsplan.runtime.sharding.precision import loss_scaling
from dsplan.runtime.sharding.stages import Sharded
from dsplan.runtime.unanswered import UNANSWERED
from dsplan.schemas.batch import Batch
from dsplan.schemas.config import DsConfig
from dsplan.schemas.problem import Problem
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from dsplan.runtime.measuring.meter import Meter
    from dsplan.runtime.measuring.monitors import Monitor
    from dsplan.runtime.measuring.wall_clock import WallClock


MANY_BACKWARDS = 8
"""As many in a row are hardly the losses of one step."""


@dataclass(frozen=True)
class Parts:
    """What initialize() put together for the engine."""

    sharded: Sharded
    optimizer: Optimizer | None
    lr_scheduler: Any
    config: DsConfig
    batch: Batch
    device: torch.device
    strict: bool


class Engine(Answers, Keeping, PlainBackward, nn.Module):
    """engine(x), engine.backward(loss), engine.step(): once each per micro-batch. Attributes it lacks are the module's."""

    def __init__(self, parts: Parts):
        super().__init__()
        self.module = parts.sharded.model
        self.optimizer = parts.optimizer
        self.lr_scheduler = parts.lr_scheduler
        self.device = parts.device
        self.observers: list[Observer] = []
        self.global_rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.local_rank = local_rank()
        self.micro_steps = 0
        self.global_steps = 0
        self.skipped_steps = 0
        self.global_samples = 0
        self._sharded = parts.sharded
        self._config = parts.config
        self._batch = parts.batch
        self._strict = parts.strict
        scaling = loss_scaling(parts.config)
        own = parts.config.raw.get("dsplan")
        own = own if isinstance(own, Mapping) else {}
        halves = parts.config.precision == "fp16" and own.get("halve_gradients_at_scale_growth") is True
        self.scaler = LossScale.start(scaling, halves_at_growth=halves) if scaling is not None else None
        bf16 = parts.config.raw.get("bf16") if parts.config.precision == "bf16" else None
        self._check_overflow = (bf16 or {}).get("check_grad_overflow", True) is not False
        self._stop_on_nan_loss = own.get("stop_on_nan_loss") is True
        self._norm: float | None = None
        self._boundary: bool | None = None
        self._step_began = 0  # micro_steps at the end of the last optimizer step
        self._backward_ran = False
        self._backward_open = False
        self._unstepped = 0  # backward passes since the last step()
        self._stepping = False
        self._in_no_sync = False
        self._training_together = False  # this step's first micro-batch has found every rank training
        self._step_applied = False
        self._batch_seen = False
        self.training_dataloader: Loader | None = None
        self.meter: Meter | None = None
        self.wall_clock: WallClock | None = None
        self.monitor: Monitor | None = None
        self.is_compiled = False
        self.checkpoint_options = parts.config.checkpoints
        self.pending_save: Background | None = None
        if isinstance(self.optimizer, Optimizer):
            self.optimizer.register_step_pre_hook(self._refuse_own_step)
        self.tell_optimizer()
        open_host_group()
        values.know(self)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            if name in UNANSWERED and not hasattr(self.module, name):
                raise AttributeError(
                    f"engine.{name} of DeepSpeed is not carried out by dsplan's native engine; run this script with DeepSpeed"
                ) from None
            return getattr(self.module, name)

    # --- the loop ---

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._recover()
        if not torch.is_grad_enabled():
            self.together("evaluates")
            with self._autocast():
                output = self.module(*args, **kwargs)
            self._sharded.drop_gathered()  # no backward will
            return output
        self.together("trains")
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        chained = any(tensor.grad_fn is not None for tensor in inputs)
        if self.training:
            if not self._batch_seen:
                self._see_batch(inputs)
            for observer in self.observers:
                observer.forward_begins(inputs)
        del inputs
        with self._autocast():
            output = self.module(*args, **kwargs)
        self._watch(output, chained=chained)
        if self.training:
            for observer in self.observers:
                observer.forward_ends()
        return output

    def _autocast(self) -> torch.autocast:
        """What the file says under torch_autocast, and nothing else: one that the script has switched on does not reach in."""
        dtype = self._sharded.precision.autocast
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, **options: Any
    ) -> torch.Tensor:
        """Gradients of loss / accumulation, summed over the micro-batches of a step and averaged over ranks.

        Returns the loss as it was divided.
        """
        refuse_loss(loss, options)
        if self.optimizer is None:
            raise Problem(NO_OPTIMIZER)
        if self._stop_on_nan_loss:
            refuse_nan_loss(loss, self.global_steps)
        boundary = self.begin_backward()
        divided = loss.float() / self._batch.accumulation if scale_wrt_gas else loss.float()
        scaled = divided if self.scaler is None else divided * self.scaler.value
        with self._own_backward():
            scaled.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        self.end_backward(boundary, loss.detach())
        return divided.detach()

    def begin_backward(self) -> bool:
        """Whether it ends the step's accumulation."""
        self._recover()
        self._backward_open = True
        for observer in self.observers:
            observer.backward_begins()
        self._keep_gathered(False)
        boundary = self.is_gradient_accumulation_boundary() and not self._in_no_sync
        self._sharded.before_backward(boundary)
        return boundary

    def _recover(self) -> None:
        """A backward that did not come to its end has raised, and the script goes on."""
        if self._backward_open:
            self._backward_open = False
            self._sharded.recover()

    def end_backward(self, boundary: bool, loss: torch.Tensor) -> None:
        """loss: as the script has it; nan where it has not said."""
        self._sharded.after_backward(boundary)
        self._backward_open = False
        self._backward_ran = True
        self._unstepped += self._boundary is None and not self._in_no_sync
        if self._unstepped == MANY_BACKWARDS:
            note(
                f"engine.backward has run {MANY_BACKWARDS} times without engine.step(); it goes after each of them, at a boundary or not"
            )
        for observer in self.observers:
            observer.backward_ends(loss)

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Close one micro-batch; at the accumulation boundary, clip and step the optimizer and the schedule."""
        if self.optimizer is None:
            raise Problem(NO_OPTIMIZER)
        if self._in_no_sync:
            raise Problem("engine.step() is called inside no_sync; leave it before the last backward of the step")
        if not self._backward_ran:
            raise Problem(
                f"rank {self.global_rank}: engine.step() at step {self.global_steps} comes without engine.backward(loss) "
                "before it, so there are no gradients; call engine.backward(loss) once for each step(), with a loss of what "
                "engine(inputs) gave"
            )
        boundary = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        self._step_applied = False
        self._backward_ran = False
        self._unstepped = 0
        if not boundary:
            return
        for observer in self.observers:
            observer.step_begins()
        self._sharded.drop_gathered()
        if self._update():
            self._step_optimizer(self.optimizer)
            self._step_applied = True
            if self.lr_scheduler is not None:
                advance(self.lr_scheduler, lr_kwargs or {})
        else:
            self.skipped_steps += 1
        self.optimizer.zero_grad(set_to_none=True)
        self._sharded.scalars.drop_gradients()
        self.global_steps += 1
        self.global_samples += self._batch.global_batch
        self._step_began = self.micro_steps
        self._training_together = False
        self.tell_optimizer()
        for observer in self.observers:
            observer.step_ends()

    def tell_optimizer(self) -> None:
        """Scripts, and Accelerate, read these where DeepSpeed's own optimizers hold them."""
        if self.optimizer is not None:
            vars(self.optimizer).update(
                loss_scale=self.cur_scale,
                cur_scale=self.cur_scale,
                overflow=self.global_steps > 0 and not self._step_applied,
                _global_grad_norm=self._norm,
            )

    def _step_optimizer(self, optimizer: Optimizer) -> None:
        """Problem where the first step fails: an optimizer that is made for whole tensors, perhaps."""
        self._stepping = True
        try:
            optimizer.step()
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            if self.global_steps > self.skipped_steps:
                raise
            reason = str(error).strip().partition("\n")[0]
            raise Problem(
                f"the first step of optimizer {type(optimizer).__name__} failed ({type(error).__name__}: {reason}); it steps "
                "over shards (DTensors), so it must work element by element, as AdamW and SGD do",
                user_traceback="".join(traceback.format_exception(error)),
            ) from error
        finally:
            self._stepping = False

    def _refuse_own_step(self, *_: Any) -> None:
        if not self._stepping:
            raise Problem(
                "optimizer.step() is called by the script, which neither unscales nor clips gradients and leaves schedule and "
                "counters behind; call engine.step() in its place"
            )

    def _update(self) -> bool:
        """Unscale and clip the gradients; False where they are not finite, on every rank alike."""
        trained = [parameter for parameter in self._sharded.masters().values() if parameter.requires_grad]
        scale = 1.0 if self.scaler is None else self.scaler.value
        norm = global_norm(trained, self.device).item() / scale
        if isinstance(self.optimizer, Muon) and self._sharded.zero_stage > 0 and math.isfinite(norm):
            self.optimizer.orthogonalise(scale)  # as DeepSpeed: what is told and clipped there is the updates' norm
            norm = global_norm(trained, self.device).item() / scale
        overflow = not math.isfinite(norm)
        self._norm = math.inf if overflow else norm  # as DeepSpeed tells it, nan or not
        divisor = 1.0 if self.scaler is None else self.scaler.update(overflow)
        if overflow and self._check_overflow:
            why = f"; loss scale {scale:g} -> {self.scaler.value:g}" if self.scaler is not None else ""
            note(f"step {self.global_steps} skipped: gradients are not finite{why}")
            return False
        scale_gradients(trained, clip_factor(norm * scale / divisor, self._config.gradient_clipping) / divisor)
        return True

    def together(self, doing: Doing) -> None:
        """Once per step, and wherever something else than training begins: are the other ranks at the same?"""
        if self._sharded.zero_stage > 0 and not (doing == "trains" and self._training_together):
            refuse_apart(doing, self._sharded.zero_stage, self.global_steps)
            self._training_together = doing == "trains"

    def _see_batch(self, inputs: list[torch.Tensor]) -> None:
        """Say once what the global batch really is. The first tensor with a dim gives the number of samples."""
        self._batch_seen = True
        batch = self._batch
        fed = next((tensor.shape[0] for tensor in inputs if tensor.dim() > 0), batch.micro_batch)
        total = f"micro-batch {fed} x accumulation {batch.accumulation} x dp {self.world_size}"
        if fed == batch.micro_batch:
            note(f"the global batch is {batch.global_batch} = {total}")
            return
        text = (
            f"the script feeds {fed} samples per rank and micro-batch, but the config says {batch.micro_batch}: the global "
            f"batch is {fed * batch.accumulation * self.world_size} = {total}, not {batch.global_batch}"
        )
        if self._strict:
            raise Problem(f"{text}; feed {batch.micro_batch} samples, or leave out --strict")
        note(text)

    def masters(self) -> dict[str, nn.Parameter]:
        """What the optimizer steps over, by name: fp32, and each a DTensor."""
        return self._sharded.masters()

    @property
    def sharded(self) -> Sharded:
        """The module as it lies over the ranks."""
        return self._sharded

    @property
    def units(self) -> tuple[FSDPModule, ...]:
        """What is sharded and gathered together: the blocks in order, then the model with the rest."""
        return self._sharded.units

    # --- accumulation ---

    def is_gradient_accumulation_boundary(self) -> bool:
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps - self._step_began + 1) % self._batch.accumulation == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """From now on the caller says which micro-batch ends a step."""
        self._boundary = is_boundary

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of the backward passes inside stay on their rank, until one outside ends the step. Stages 0 and 1."""
        stage = self._sharded.zero_stage
        if stage >= 2:
            raise Problem(
                f"no_sync does not go with zero stage {stage}, which keeps no gradient whole; use stage 0 or 1, or "
                "gradient_accumulation_steps"
            )
        if self._in_no_sync:
            raise Problem("no_sync is entered inside no_sync; leave the outer one first")
        self._in_no_sync = True
        try:
            yield
        finally:
            self._in_no_sync = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop every gradient, also what is summed up of a step that has not ended."""
        self._recover()
        self._sharded.drop_gradients()

    # --- what tunes and measures ---

    def compile(
        self,
        backend: Any = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """torch.compile of each block, or of the model where it has none. Again: does nothing."""
        if schedule is not None or compiled_autograd_enabled:
            option = "schedule" if schedule is not None else "compiled_autograd_enabled"
            raise Problem(f"engine.compile: {option} is part of DeepCompile, which is DeepSpeed's own; leave it out")
        if not self.is_compiled:
            compile_blocks(self.module, {**(compile_kwargs or {}), "backend": backend})
            self.is_compiled = True

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Milliseconds of the last step's parts, where wall_clock_breakdown is on."""
        return {} if self.wall_clock is None else self.wall_clock.timers()

    # --- what checkpoints ask and set ---

    def unfinished_micro_batches(self) -> int:
        """Of the step that is under way: how many have been through backward."""
        return self.micro_steps - self._step_began

    def restore_counters(self, saved: Mapping[str, Any]) -> None:
        """Those of a checkpoint, which is always between two steps. micro_steps counts at this run's accumulation."""
        self.global_steps, self.skipped_steps = saved["global_steps"], saved["skipped_steps"]
        self.global_samples = saved["global_samples"]
        same = saved["accumulation"] == self._batch.accumulation
        self.micro_steps = saved["micro_steps"] if same else self.global_steps * self._batch.accumulation
        self._step_began = self.micro_steps
        self._sharded.drop_gradients()

    def destroy(self) -> None:
        """Give back what training needs beside weights and optimizer: gathered copies, gradients."""
        self._sharded.drop_gathered()
        self._sharded.drop_gradients()

    def drop_gathered(self) -> None:
        """Free every gathered parameter: the module holds its shards alone."""
        self._sharded.drop_gathered()
