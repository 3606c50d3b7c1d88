"""The allocation timeline of one forward and backward, cut where the unit that runs changes."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from dsplan.planner.tracing.kernels import grouped_mm, normal_value
from dsplan.runtime.storages import StorageTracker
from dsplan.schemas.trace import ACTIVATION, SPLIT_ACTIVATION, Events, Point, Segment, TracePhase
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import Node, _engine_run_backward

OUTER, COLUMN, INNER, ROW = range(4)
"""Where an operation stands towards tensor parallelism: outside, in a column linear, between the two, in a row linear."""

_MADE_SPLIT = {"forward": (COLUMN, INNER), "backward": (INNER, ROW)}
"""What is made there is divided over tp: a column linear's output and all up to the row linear; in backward, the reverse."""

_LABELS = {"other": ACTIVATION, "split": SPLIT_ACTIVATION}

_LAST_SEQUENCE_NR = 2**63
"""Nodes that accumulate gradients bear the highest number of all, whenever they were made."""


@dataclass(slots=True)
class _Frame:
    unit: int
    place: int = OUTER


class Timeline(StorageTracker):  # type: ignore[no-untyped-call]
    """Records each storage made and freed in forward and backward of a model that holds fake (or real cpu) weights.

    units: the modules of Trace.units[1:], by index; unit 0 is all else. roles: COLUMN or ROW by linear module.
    Usage: `with timeline: ...; timeline.start(inputs); ...forward, loss...; timeline.run_backward(loss)`, then `segments`.
    In backward an operation belongs to the unit in whose forward its autograd node was made, which the node's sequence
    number tells; no hook holds a tensor. Gradients are labelled by what ends as `.grad`, and are dropped when their unit
    is done.
    """

    def __init__(self, model: nn.Module, units: Sequence[nn.Module], roles: Mapping[nn.Module, int]):
        super().__init__()
        self._model = model
        self.notes: list[str] = []
        held = params_by_unit(model, units)
        self._params = [[param for _, param in named if param.requires_grad] for named in held]
        self._ordinals = {id(param): index for index, (_, param) in enumerate(itertools.chain(*held))}
        self._owners = [unit for unit, named in enumerate(held) for _ in named]
        self._phase: TracePhase = "forward"
        self._frames = [_Frame(0)]
        self._unit = 0
        self._input_bytes = 0
        self._marks: list[tuple[int, int, int]] = []
        self._labels: list[str | int] = []
        self._serials: dict[int, int] = {}
        self._events: list[tuple[int, int, int]] = []
        self._module = 0
        self._modules: dict[str, int] = {"": 0}
        self._cuts: list[tuple[int, int, TracePhase]] = []
        for unit, module in enumerate(units, start=1):
            module.forward = self._in_unit(module.forward, unit)
        for module, role in roles.items():
            module.forward = self._in_linear(module.forward, role)

    def start(self, inputs: Sequence[torch.Tensor]) -> None:
        """Forward begins. What the model holds is not counted, its inputs are."""
        for param in self._model.parameters():
            self.add(param, "state")
        for buffer in self._model.buffers():
            self.add(buffer, "state")
        for tensor in inputs:
            self.add(tensor, "other")
        self._input_bytes = self.live.get("other", 0)
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
        for hook in hooks:
            hook.remove()
        for params in self._params:
            for param in params:
                param.grad = None

    def segments(self) -> tuple[Segment, ...]:
        """The timeline as it was recorded; segments in which nothing happened are left out."""
        live = {"other": self._input_bytes, "split": 0}
        grads = [0] * len(self._params)
        made: list[Segment] = []
        states = [self._labels[serial] == "state" for serial, _, _ in self._events]
        before = [0, *itertools.accumulate(not state for state in states)]
        for (begin, unit, phase), (end, _, _) in itertools.pairwise(self._cuts):
            points = [_point(live, grads[unit])]
            for serial, delta, _ in self._events[begin:end]:
                label = self._labels[serial]
                if isinstance(label, int):
                    grads[self._owners[label]] += delta
                elif label != "state":
                    live[label] += delta
                if delta > 0 and label != "state":
                    points.append(_point(live, grads[unit]))
            if end > begin:
                last = _point(live, grads[unit])
                made.append(
                    Segment(
                        unit=unit,
                        phase=phase,
                        start=points[0],
                        end=last,
                        points=undominated([*points, last]),
                        first_event=before[begin],
                    )
                )
        return tuple(made)

    def events(self) -> Events:
        """All that was made and freed but for what the model holds; storages are numbered anew."""
        numbers: dict[int, int] = {}
        columns: tuple[list[int], list[int], list[int]] = ([], [], [])
        for serial, delta, module in self._events:
            if self._labels[serial] != "state":
                for column, value in zip(
                    columns, (numbers.setdefault(serial, len(numbers)), delta, module), strict=True
                ):
                    column.append(value)
        told = [self._labels[serial] for serial in numbers]
        labels = [label if isinstance(label, int) else _LABELS[label] for label in told]
        return Events.of(*columns, labels, tuple(self._modules))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled under it, and the wrapper costs a third of the trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.notes.append("a tensor's value is read (.item(), if tensor: ...); 1.0, 0 or False stood for it")
            return normal_value(args[0])
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # two of three calls
        unit, place = self._where()
        if unit != self._unit:
            self._cut(unit)
        self.category = "split" if place in _MADE_SPLIT[self._phase] else "other"
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype is not torch.bfloat16:
            func = grouped_mm  # its fake form takes bf16 alone
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _where(self) -> tuple[int, int]:
        if self._phase == "forward" or len(self._frames) > 1:  # in backward: a block that is computed again
            frame = self._frames[-1]
            return frame.unit, frame.place
        return self._made_in(torch._C._current_autograd_node())

    def _made_in(self, node: Any) -> tuple[int, int]:
        number = node._sequence_nr() if node is not None else _LAST_SEQUENCE_NR
        if number >= _LAST_SEQUENCE_NR or not self._marks:
            return self._unit, OUTER
        _, unit, place = self._marks[max(0, bisect.bisect_right(self._marks, (number, 1 << 30, 0)) - 1)]
        return unit, place

    def _unit_of(self, node: Any) -> int:
        return self._made_in(node)[0]

    def _mark(self) -> None:
        """Nodes made from now on belong to the innermost frame."""
        number = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        if self._marks and self._marks[-1][0] == number:
            self._marks.pop()
        self._marks.append((number, self._frames[-1].unit, self._frames[-1].place))

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
        done, self._unit = self._unit, unit
        if self._phase == "backward" and done != unit:
            for param in self._params[done]:
                param.grad = None

    def _accumulated(self, ordinal: int, param: torch.Tensor) -> None:
        if param.grad is not None:
            self._label(param.grad, ordinal)

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

    def _label(self, tensor: torch.Tensor, label: int) -> None:
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # sparse
            return
        serial = self._serials.get(storage._cdata)
        if serial is not None:
            self._labels[serial] = label

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


def _point(live: Mapping[str, int], grad_bytes: int) -> Point:
    return Point(live["other"] + live["split"], live["split"], grad_bytes)


def undominated(points: Sequence[Point]) -> tuple[Point, ...]:
    """The points that no other exceeds in activation_bytes, in its part that tp leaves whole, and in grad_bytes.

    Under any tp the bytes are a mean of the first two, so no peak is lost.
    """

    def key(point: Point) -> tuple[int, int, int]:
        return (point.activation_bytes, point.activation_bytes - point.split_bytes, point.grad_bytes)

    kept: dict[tuple[int, int, int], Point] = {}
    for point in sorted(points, key=key, reverse=True):
        candidate = key(point)
        if not any(all(a >= b for a, b in zip(other, candidate, strict=True)) for other in kept):
            kept[candidate] = point
    return tuple(kept.values())
