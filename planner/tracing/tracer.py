"""A subject -> its Trace: one forward and backward on fake cpu tensors, under the storage tracker."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from dsplan.planner.capturing.standing import stand_ins
from dsplan.planner.compiler_put_off import compiler_put_off, is_put_off
from dsplan.planner.models.blaming import user_code
from dsplan.planner.models.calling import check_inputs
from dsplan.planner.models.kernel_checks import KernelChecks
from dsplan.planner.models.load import ModelSubject, Subject
from dsplan.planner.models.lost_gradients import no_gradient
from dsplan.planner.models.weightless import (
    DTYPES,
    Inputs,
    compute_dtype,
    fakes,
    is_quantized,
    lent_weights,
    logical_shape,
    stand_in,
    tensors_of,
)
from dsplan.planner.tracing.deriving import between
from dsplan.planner.tracing.flops import Flops, disagreement, forward_flops
from dsplan.planner.tracing.frozen_inputs import watching
from dsplan.planner.tracing.half_types import TWINS, names_half_types
from dsplan.planner.tracing.kernels import GpuKernels
from dsplan.planner.tracing.quick_fakes import QuickFakes
from dsplan.planner.tracing.recording import Recording
from dsplan.planner.tracing.repeating import Run, find_runs, left_out
from dsplan.planner.tracing.replicating import replicated
from dsplan.planner.tracing.splitting import Splitting, splitting
from dsplan.planner.tracing.timeline import Timeline, params_by_unit
from dsplan.runtime.recompute import apply_recompute
from dsplan.runtime.sharding.blocks import find_blocks
from dsplan.schemas.problem import Problem
from dsplan.schemas.trace import NO_EVENTS, Param, Segment, Trace, Unit
from torch import nn
from torch.utils._pytree import tree_leaves

logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # what it reports is raised as well


def trace(
    subject: Subject,
    *,
    precision: str,
    recompute: str = "none",
    micro_batch: int | None = None,
    seq_len: int | None = None,
    count_flops: bool = True,
) -> Trace:
    """The trace of one model at one compute dtype, recompute policy, micro_batch (None: 1, or what a script feeds) and seq_len.

    The same arguments give the same object. Without count_flops FLOPs are None, unless they are known: for who asks for bytes
    alone. Problem where the model cannot run, with the user's own traceback.
    """
    seq_len = subject.seq_len if seq_len is None else seq_len
    key: tuple[Any, ...] = (precision, recompute, micro_batch, seq_len)
    if not isinstance(subject, ModelSubject):
        if key not in subject.traces:
            from dsplan.planner.capturing.capture import ScriptSubject, capture

            assert isinstance(subject, ScriptSubject)
            subject.traces[key] = capture(subject, precision, recompute, micro_batch)
        return subject.traces[key]
    if not count_flops and key not in subject.traces:
        key = (*key, "bytes alone")
    if key not in subject.traces:
        twin = subject.traces.get((TWINS.get(precision), *key[1:]))
        if twin is not None and not names_half_types(subject.module, _functions_of(subject)):
            subject.traces[key] = replace(twin, precision=precision)
        else:
            with compiler_put_off(), stand_ins() as stood_in:
                made = _trace_model(subject, precision, recompute, micro_batch or 1, seq_len, count_flops)
            subject.traces[key] = replace(made, notes=tuple(dict.fromkeys([*made.notes, *stood_in])))
    return subject.traces[key]


def _functions_of(subject: ModelSubject) -> list[Callable[..., Any]]:
    return [found for found in (subject.loss, subject.sample_batch) if found is not None]


def _trace_model(
    subject: ModelSubject, precision: str, recompute: str, micro_batch: int, seq_len: int | None, count_flops: bool
) -> Trace:
    module, dtype = subject.module, DTYPES[precision]
    blocks = find_blocks(module)
    rules = splitting(module, blocks)
    notes = [*subject.notes, *rules.notes]
    segments: tuple[Segment, ...] = ()
    events = NO_EVENTS
    flops = None
    counted = None
    known_seq_len = None
    loss_inside = False
    if subject.sample_batch is not None:
        batch = sample(subject, micro_batch, seq_len)
        inputs = inputs_of(batch)
        check_inputs(subject.file, module, inputs.args, inputs.kwargs)
        known_seq_len = seq_len if seq_len is not None else sequence_length(batch)
        notes += _rows(batch, micro_batch)
        if count_flops:
            flops = _flops(subject, blocks, micro_batch, seq_len)
            notes += flops.notes
        recorded = _recording(subject, blocks, rules, dtype, recompute, micro_batch, seq_len, known_seq_len)
        segments, events = recorded.recording.segments(), recorded.recording.trace_events()
        counted = recorded.recording.phase_flops()
        notes += disagreement(flops, counted)
        notes += recorded.notes
        loss_inside = recorded.loss_inside
    made = assemble(
        subject.source, module, blocks, rules, flops, segments, precision, recompute,
        micro_batch if segments else None, known_seq_len, notes,
    )  # fmt: skip
    return replace(
        made,
        loss_inside=loss_inside,
        events=events,
        backward_flops=counted[1] if counted else None,
        recompute_flops=counted[2] if counted else None,
    )


def assemble(
    source: str,
    module: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    rules: Splitting,
    flops: Flops | None,
    segments: tuple[Segment, ...],
    precision: str,
    recompute: str,
    micro_batch: int | None,
    seq_len: int | None,
    notes: Sequence[str],
) -> Trace:
    """The Trace of what was recorded, with the model's parameters as they are in the compute dtype."""
    dtype = DTYPES[precision]
    names = ["", *(name for name, _ in blocks)]
    units = []
    for index, held in enumerate(params_by_unit(module, [block for _, block in blocks])):
        params = tuple(
            Param(
                name=name,
                shape=logical_shape(param),
                dtype_bytes=dtype.itemsize if is_quantized(param) else compute_dtype(param, dtype).itemsize,
                trainable=param.requires_grad,
                tp_dim=rules.dims.get(id(param)),
                stored_bytes=param.numel() * param.itemsize if is_quantized(param) else None,
            )
            for name, param in held
        )
        units.append(Unit(name=names[index], params=params, forward_flops=flops.units[index] if flops else 0.0))
    buffers = {id(buffer): buffer for buffer in module.buffers()}.values()
    return Trace(
        source=source,
        units=tuple(units),
        buffer_bytes=sum(buffer.numel() * compute_dtype(buffer, dtype).itemsize for buffer in buffers),
        precision=precision,
        recompute=recompute,
        micro_batch=micro_batch,
        seq_len=seq_len,
        segments=segments,
        forward_flops=flops.total if flops else None,
        flops_source=flops.source if flops and flops.total is not None else None,
        tp_limit=rules.limit,
        no_tp_rule=rules.no_rule,
        notes=tuple(dict.fromkeys(notes)),
    )


def _flops(
    subject: ModelSubject, blocks: Sequence[tuple[str, nn.Module]], micro_batch: int, seq_len: int | None
) -> Flops:
    """Counted once: neither precision nor recompute changes them."""
    key = (micro_batch, seq_len)
    if key not in subject.flops:
        inputs = inputs_of(sample(subject, micro_batch, seq_len))
        with user_code(subject.file, "the model raised"), uncompiled():
            subject.flops[key] = forward_flops(subject.module, blocks, inputs, _runs(subject, blocks))
    return subject.flops[key]


def sample(subject: ModelSubject, micro_batch: int, seq_len: int | None) -> Any:
    """The sample batch on device meta: shapes alone. Made on meta too, unless it reads values on its way."""
    assert subject.sample_batch is not None
    try:
        with torch.device("meta"):
            batch = subject.sample_batch(micro_batch, seq_len)
    except Problem:
        batch = subject.sample_batch(micro_batch, seq_len)
    return stand_in(batch, lambda tensor: tensor.to("meta"))


def inputs_of(batch: Any) -> Inputs:
    """A tuple is positional, a dict is by keyword."""
    return Inputs((), batch) if isinstance(batch, dict) else Inputs(tuple(batch), {})


def sequence_length(batch: Any) -> int | None:
    """The second dim of the first integer tensor; None where there is none."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor) and not leaf.is_floating_point() and leaf.dim() == 2:
            return int(leaf.shape[1])
    return None


def _rows(batch: Any, micro_batch: int) -> list[str]:
    """A note where the batch is not of micro_batch samples."""
    tensors = [leaf for leaf in tensors_of(batch) if leaf.dim() > 0]
    if isinstance(batch, dict) and "cu_seq_lens_q" in batch:  # one row of packed sequences
        return []
    if not tensors or any(tensor.shape[0] == micro_batch for tensor in tensors):
        return []
    return [
        f"sample_batch({micro_batch}) returned {int(tensors[0].shape[0])} rows along dim 0: activations, FLOPs and time are of "
        f"that batch, though micro_batch is {micro_batch}"
    ]


def _recording(
    subject: ModelSubject,
    blocks: Sequence[tuple[str, nn.Module]],
    rules: Splitting,
    dtype: torch.dtype,
    recompute: str,
    micro_batch: int,
    seq_len: int | None,
    known_seq_len: int | None,
) -> _Recorded:
    """Repeated blocks are traced few, where those that are traced do alike; sizes between others that were traced are derived."""
    num_params = [len(held) for held in params_by_unit(subject.module, [block for _, block in blocks])]
    record = functools.partial(_record, subject, blocks, num_params, rules, dtype, recompute, micro_batch, seq_len)
    runs = _runs(subject, blocks)
    names = [name for name, _ in blocks]
    at = (micro_batch, known_seq_len)
    few: dict[_Size, _Recorded] = subject.recordings.setdefault((dtype, recompute, "few"), {})
    every: dict[_Size, _Recorded] = subject.recordings.setdefault((dtype, recompute, "all"), {})
    derived = _derived(few, at)
    if derived is not None:
        whole = replicated(derived.recording, runs, names)
        if whole is not None:
            return replace(derived, recording=whole)
    derived = _derived(every, at)
    if derived is not None:
        return derived
    if runs:
        try:
            with left_out(subject.module, blocks, runs):
                recorded = record()
        except Problem:
            recorded = None  # a loop over the number of layers, perhaps
        whole = replicated(recorded.recording, runs, names) if recorded is not None else None
        if recorded is not None and whole is not None:
            few[at] = recorded
            return replace(recorded, recording=whole)
    every[at] = record()
    return every[at]


_Size = tuple[int, int | None]
"""(micro_batch, length)."""


def _derived(known: Mapping[_Size, _Recorded], at: _Size) -> _Recorded | None:
    """The recording at a size out of those that differ in one of the two."""
    micro_batch, length = at
    rows = {rows: found for (rows, other), found in known.items() if other == length}
    lengths = {other: found for (rows, other), found in known.items() if rows == micro_batch and other is not None}
    for value, found in ((micro_batch, rows), (length, lengths)):
        if value is None or any(other.notes != first.notes for first in found.values() for other in found.values()):
            continue
        made = between({size: recorded.recording for size, recorded in found.items()}, value)
        if made is not None:
            return replace(next(iter(found.values())), recording=made)
    return None


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """What torch.compile wraps runs as it is written: what it fuses is not foreseen, and compiling costs minutes."""
    if "torch._dynamo" not in sys.modules or is_put_off():
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _runs(subject: ModelSubject, blocks: Sequence[tuple[str, nn.Module]]) -> list[Run]:
    if subject.runs is None:
        subject.runs = find_runs(blocks)
    return subject.runs


@dataclass(frozen=True, slots=True)
class _Recorded:
    recording: Recording
    notes: list[str]
    loss_inside: bool
    """The model's own forward computes the loss."""


def _record(
    subject: ModelSubject,
    blocks: Sequence[tuple[str, nn.Module]],
    num_params: Sequence[int],
    rules: Splitting,
    dtype: torch.dtype,
    recompute: str,
    micro_batch: int,
    seq_len: int | None,
) -> _Recorded:
    """One forward and backward of the model as it stands, all blocks or not."""
    module = subject.module
    units = [block for _, block in blocks]
    mode = QuickFakes(allow_non_fake_inputs=True)
    stand = fakes(mode, dtype)
    with lent_weights(module, stand):
        batch = stand_in(sample(subject, micro_batch, seq_len), stand)
        timeline = Timeline(module, units, rules.roles, num_params)
        apply_recompute(module, recompute)  # type: ignore[arg-type]
        blind = functools.partial(bool, timeline.notes)
        checks = KernelChecks(module, subject.file)
        watched = watching(module, timeline)
        with (
            user_code(subject.file, "the model raised", blind),
            uncompiled(),
            mode,
            GpuKernels(),
            checks,
            watched,
            timeline,
        ):
            inputs = inputs_of(batch)
            timeline.start(inputs.tensors)
            output = inputs.feed(module)
            loss, notes = loss_of(subject, output, batch)
            del output  # as in a loop that keeps its batch and its loss
            timeline.run_backward(loss)
        loss_inside = subject.loss is None and not notes  # a note says that a mean stands for the loss
        return _Recorded(timeline.recording(), [*notes, *timeline.assumptions], loss_inside)


def loss_of(subject: ModelSubject, output: Any, batch: Any) -> tuple[torch.Tensor, list[str]]:
    notes: list[str] = []
    source = subject.file or subject.source
    if subject.loss is not None:
        with user_code(subject.file, "loss(output, batch) raised"):
            value = subject.loss(output, batch)
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise Problem(f"{source}: loss(output, batch) returned {shape_of(value)}, but must return a scalar tensor")
    else:
        own = _own_loss(output)
        if own is None:
            first = next((leaf for leaf in tensors_of(output) if leaf.is_floating_point()), None)
            if first is None:
                raise Problem(
                    f"{source}: the model's output is {shape_of(output)}, but must hold a float tensor; add loss(output, batch)"
                )
            own = first.mean()
            notes.append(f"{source} has no loss(output, batch): the mean of the output stands for it")
        value = own
    if not value.requires_grad:
        raise no_gradient(subject.file, str(source), subject.module, functools.partial(_once_more, subject, batch))
    return value, notes


def _once_more(subject: ModelSubject, batch: Any) -> None:
    output = inputs_of(batch).feed(subject.module)
    if subject.loss is not None:
        subject.loss(output, batch)


def _own_loss(output: Any) -> torch.Tensor | None:
    if isinstance(output, torch.Tensor):
        return output if output.numel() == 1 else None
    value = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if value is None and isinstance(output, tuple) and output:
        value = output[0] if isinstance(output[0], torch.Tensor) and output[0].numel() == 1 else None
    return value if isinstance(value, torch.Tensor) and value.numel() == 1 else None


def shape_of(value: Any) -> str:
    """A value as a message says it: "a tensor of shape [2, 3]", "a str"."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"a {type(value).__name__}" if value is not None else "None"
