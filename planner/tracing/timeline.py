"""The allocation timeline of one forward and backward, cut where the unit that runs changes."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from dsplan.planner.tracing.choices import KnownValues
from dsplan.planner.tracing.kernels import grouped_mm, normal_value
from dsplan.planner.tracing.operators import formulas
from dsplan.planner.tracing.recording import MARK, OTHER, SPLIT, STATE, Cut, Event, Recording
from dsplan.runtime.measuring.storages import StorageTracker
from dsplan.schemas.trace import Events, Segment, TracePhase
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import Node, _engine_run_backward

OUTER, COLUMN, INNER, ROW = range(4)
"""Where an operation stands towards tensor parallelism: outside, in a column linear, between the two, in a row linear."""

_MADE_SPLIT = {"forward": (COLUMN, INNER), "backward": (INNER, ROW)}
"""What is made there is divided over tp: a column linear's output and all up to the row linear; in backward, the reverse."""

_LAST_SEQUENCE_NR = 2**63
"""Nodes that accumulate gradients bear the highest number of all, whenever they were made."""


@dataclass(slots=True)
class _Frame:
    unit: int
    place: int = OUTER


class Timeline(StorageTracker):  # type: ignore[no-untyped-call]
    """Records each storage made and freed in forward and backward of a model that holds fake (or real cpu) weights.

    units: the modules of Trace.units[1:], by index; unit 0 is all else. roles: COLUMN or ROW by linear module.
    num_params: by unit, of the whole model; needed where blocks of it are left out of `model` (repeating.py).
    Usage: `with timeline: ...; timeline.start(inputs); ...forward, loss...; timeline.run_backward(loss)`, then `recording`.
    In backward an operation belongs to the unit and module in whose forward its autograd node was made, which the node's
    sequence number tells; no hook holds a tensor. Gradients are labelled by what ends as `.grad`, and are dropped when
    their unit is done.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[nn.Module],
        roles: Mapping[nn.Module, int],
        num_params: Sequence[int] | None = None,
    ):
        super().__init__()
        self._model = model
        self.notes: list[str] = []
        held = params_by_unit(model, units)
        num_params = num_params or [len(named) for named in held]
        firsts = [0, *itertools.accumulate(num_params)]
        self._params = [[param for _, param in named if param.requires_grad] for named in held]
        self._ordinals = {
            id(param): first + index
            for first, named in zip(firsts, held, strict=False)
            for index, (_, param) in enumerate(named)
        }
        self._owners = [unit for unit, number in enumerate(num_params) for _ in range(number)]
        self._phase: TracePhase = "forward"
        self._frames = [_Frame(0)]
        self._unit = 0
        self._marks: list[tuple[int, int, int, int]] = []
        self._labels: list[str | int] = []
        self._serials: dict[int, int] = {}
        self._events: list[Event] = []
        self._module = 0
        self._modules: list[str] = []
        self._cuts: list[Cut] = []
        self._uses: list[set[int]] = []
        self._flops: list[list[int]] = []
        self._formulas = formulas()
        self._known = KnownValues()
        own = set()
        for index, (name, module) in enumerate(model.named_modules()):
            own.add(module)
            self._modules.append(name)
            module.forward = self._in_module(module.forward, index)
        for unit, module in enumerate(units, start=1):
            if module in own:
                module.forward = self._in_unit(module.forward, unit)
        for module, role in roles.items():
            if module in own:
                module.forward = self._in_linear(module.forward, role)

    def start(self, inputs: Sequence[torch.Tensor]) -> None:
        """Forward begins. What the model holds is not counted, its inputs are."""
        for param in self._model.parameters():
            self.add(param, STATE)
        for buffer in self._model.buffers():
            self.add(buffer, STATE)
        for tensor in inputs:
            self.add(tensor, OTHER)
        self._mark()
        self._cut(0)

    def run_backward(self, loss: torch.Tensor) -> None:
        """Backward from a scalar, by the engine itself so that function modes stay on while blocks are computed again."""
        self._phase = "backward"
        self._frames = [_Frame(0)]
        self._cut(self._unit_of(loss.grad_fn))
        hooks: list[Any] = []
        for params in self._params:
            for param in params:
                hook = functools.partial(self._accumulated, self._ordinals[id(param)])
                hooks.append(param.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        hooks += self._watch_shared(loss)
        gradient = torch.ones_like(loss)
        _engine_run_backward((loss,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)
        self._cuts.append((len(self._events), -1, "backward"))
        self._uses.append(set())
        self._flops.append([0, 0])
        for hook in hooks:
            hook.remove()
        for params in self._params:
            for param in params:
                param.grad = None

    @property
    def assumptions(self) -> list[str]:
        """What was taken for values that a step would have: of data, and of choices of experts."""
        return [*dict.fromkeys([*self.notes, *self._known.notes])]

    def recording(self) -> Recording:
        return Recording(
            events=self._events,
            labels=self._labels,
            cuts=self._cuts,
            uses=self._uses,
            flops=[(made, again) for made, again in self._flops],
            modules=self._modules,
            owners=self._owners,
        )

    def segments(self) -> tuple[Segment, ...]:
        return self.recording().segments()

    def events(self) -> Events:
        return self.recording().trace_events()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled under it, and the wrapper costs a third of the trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            value = self._known.item(args[0])
            if value is not None:
                return value
            self.notes.append("a tensor's value is read (.item(), if tensor: ...); 1.0, 0 or False stood for it")
            return normal_value(args[0])
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # two of three calls
        unit, place, self._module = self._where()
        if unit != self._unit:
            self._cut(unit)
        self.category = SPLIT if place in _MADE_SPLIT[self._phase] else OTHER
        formula = self._formulas.get(func._overloadpacket)
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype is not torch.bfloat16:
            func = grouped_mm  # its fake form takes bf16 alone
        self._use(args)
        with torch._C.DisableTorchFunction():  # modes that are on in backward would see each shape that is asked
            result = super().__torch_dispatch__(functools.partial(self._known.call, func), types, args, kwargs)
        if formula is not None and self._flops:
            made = int(formula(*args, **(kwargs or {}), out_val=result))
            self._flops[-1][0] += made
            if self._phase == "backward" and torch.is_grad_enabled():  # autograd is on only where forward runs again
                self._flops[-1][1] += made
        return result

    def _use(self, values: Any) -> None:
        for value in values:
            if isinstance(value, FakeTensor):
                if value.layout is not torch.strided:
                    continue  # has no storage of its own
                serial = self._serials.get(value.untyped_storage()._cdata)
                if serial is not None and self._uses:
                    self._uses[-1].add(serial)
            elif isinstance(value, (list, tuple)):
                self._use(value)

    def _where(self) -> tuple[int, int, int]:
        """(unit, place, module) of the operation that runs."""
        if self._phase == "forward" or len(self._frames) > 1:  # in backward: a block that is computed again
            frame = self._frames[-1]
            return frame.unit, frame.place, self._module
        return self._made_in(torch._C._current_autograd_node())

    def _made_in(self, node: Any) -> tuple[int, int, int]:
        number = node._sequence_nr() if node is not None else _LAST_SEQUENCE_NR
        if number >= _LAST_SEQUENCE_NR or not self._marks:
            return self._unit, OUTER, self._module
        _, *where = self._marks[max(0, bisect.bisect_right(self._marks, (number, 1 << 30, 0, 0)) - 1)]
        return tuple(where)  # type: ignore[return-value]

    def _unit_of(self, node: Any) -> int:
        return self._made_in(node)[0]

    def _mark(self) -> None:
        """Nodes made from now on belong to the innermost frame and module."""
        number = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        if self._marks and self._marks[-1][0] == number:
            self._marks.pop()
        frame = self._frames[-1]
        self._marks.append((number, frame.unit, frame.place, self._module))

    def _in_module(self, forward: Callable[..., Any], index: int) -> Callable[..., Any]:
        @functools.wraps(forward)
        def named(*args: Any, **kwargs: Any) -> Any:
            around, self._module = self._module, index
            self._mark()
            try:
                return forward(*args, **kwargs)
            finally:
                self._module = around
                self._mark()

        return named

    def _in_unit(self, forward: Callable[..., Any], unit: int) -> Callable[..., Any]:
        @functools.wraps(forward)
        def framed(*args: Any, **kwargs: Any) -> Any:
            return self._framed(_Frame(unit), forward, args, kwargs)

        return framed

    def _in_linear(self, forward: Callable[..., Any], role: int) -> Callable[..., Any]:
        @functools.wraps(forward)
        def framed(*args: Any, **kwargs: Any) -> Any:
            around = self._frames[-1]
            unit = around.unit if len(self._frames) > 1 or self._phase == "forward" else self._unit
            try:
                return self._framed(_Frame(unit, role), forward, args, kwargs)
            finally:
                around.place = INNER if role == COLUMN else OUTER
                self._mark()

        return framed

    def _framed(self, frame: _Frame, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        depth = len(self._frames)
        self._frames.append(frame)
        self._mark()
        try:
            return forward(*args, **kwargs)
        finally:  # recomputation leaves by an exception once it has all it needs
            del self._frames[depth:]
            self._mark()

    def _cut(self, unit: int) -> None:
        self._cuts.append((len(self._events), unit, self._phase))
        self._uses.append(set())
        self._flops.append([0, 0])
        done, self._unit = self._unit, unit
        if self._phase == "backward" and done != unit:
            for param in self._params[done]:
                param.grad = None

    def _accumulated(self, ordinal: int, param: torch.Tensor) -> None:
        if param.grad is not None:
            serial = self._label(param.grad, ordinal)
            if serial is not None:
                self._events.append((serial, 0, self._module))

    def _watch_shared(self, loss: torch.Tensor) -> list[Any]:
        """Label the parts of gradients that wait to be summed, for parameters that forward uses more than once."""
        trained = {id(param): self._ordinals[id(param)] for params in self._params for param in params}
        feeders: dict[int, list[tuple[Node, int]]] = {}
        seen: set[Node] = set()
        stack = [loss.grad_fn] if loss.grad_fn is not None else []
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            for index, (following, _) in enumerate(node.next_functions):
                if following is None:
                    continue
                variable = getattr(following, "variable", None)
                if variable is None:
                    stack.append(following)
                elif id(variable) in trained:
                    feeders.setdefault(id(variable), []).append((node, index))
        hooks = []
        for key, nodes in feeders.items():
            for node, index in nodes if len(nodes) > 1 else ():
                hooks.append(node.register_hook(functools.partial(self._part, trained[key], index)))
        return hooks

    def _part(self, ordinal: int, index: int, grad_inputs: Any, grad_outputs: Any) -> None:
        if grad_inputs[index] is not None:
            self._label(grad_inputs[index], ordinal)

    def _label(self, tensor: torch.Tensor, label: int | str) -> int | None:
        """The number of the tensor's storage, which bears that label now."""
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # sparse
            return None
        serial = self._serials.get(storage._cdata)
        if serial is not None:
            self._labels[serial] = label
        return serial

    def mark_read(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A mark without bytes, for who reads the tensor to save; None where the model itself holds what is read."""
        read = self._serials.get(tensor.untyped_storage()._cdata)
        if read is None or self._labels[read] == STATE:
            return None
        mark = torch.empty(0)
        self._label(mark, MARK)
        self._events.append((read, 0, self._module))
        return mark

    def _change(self, key: int, category: str, delta: int) -> None:
        super()._change(key, category, delta)
        serial = self._serials.get(key)
        if serial is None:
            serial = self._serials[key] = len(self._labels)
            self._labels.append(category)
        self._events.append((serial, delta, self._module))

    def _freed(self, key: int) -> None:
        super()._freed(key)
        self._serials.pop(key, None)


def params_by_unit(model: nn.Module, units: Sequence[nn.Module]) -> list[list[tuple[str, nn.Parameter]]]:
    """Named parameters of unit 0 (what no block holds) and of each block. Tied ones once, under their first name."""
    owner: dict[int, int] = {}
    for unit, module in enumerate(units, start=1):
        for param in module.parameters():
            owner.setdefault(id(param), unit)
    grouped: list[list[tuple[str, nn.Parameter]]] = [[] for _ in range(len(units) + 1)]
    for name, param in model.named_parameters():
        grouped[owner.get(id(param), 0)].append((name, param))
    return grouped
