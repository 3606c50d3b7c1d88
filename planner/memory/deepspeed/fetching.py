"""Stage 3: which parameters are gathered when, as DeepSpeed's coordinator does from its second recorded step on.

Source: deepspeed/runtime/zero/{partitioned_param_coordinator,parameter_offload,partition_parameters}.py of 0.19.8.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from dsplan.planner.memory.deepspeed.beats import ENTER, LEAVE, Beats, Mark
from dsplan.planner.memory.deepspeed.saved_weights import Saved
from numpy.typing import NDArray

HELD, FLAT, SAVED = range(3)
"""Columns, in elements: whole parameters; flat buffers that several arrive in, before they are copied out; what was let go
of and autograd still keeps."""
_ABSENT, _COMING, _THERE = range(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """zero_optimization's stage3_* sizes, in elements."""

    prefetch: int
    live: int
    reuse: int
    persist: int
    persist_total: int


@dataclass(frozen=True, slots=True)
class Uses:
    """The modules in the order in which they are entered, and what each uses: DeepSpeed's own record of a step."""

    modules: tuple[int, ...]
    before: tuple[int, ...]
    """Elements of all parameters that earlier modules use, by place in `modules`; one more for the end."""
    next_use: dict[int, tuple[int, ...]]
    """By parameter: places in `modules` of the modules that use it."""
    queue: tuple[tuple[int, int], ...]
    """(parameter, place in `modules`) in the order of use."""


def uses(marks: Sequence[Mark], held: Sequence[Sequence[int]], numels: Sequence[int]) -> Uses:
    modules = tuple(module for kind, module in marks if kind == ENTER)
    before, total = [], 0
    places: dict[int, list[int]] = {}
    queue = []
    for step, module in enumerate(modules):
        before.append(total)
        for param in held[module]:
            total += numels[param]
            places.setdefault(param, []).append(step)
            queue.append((param, step))
    return Uses(modules, (*before, total), {param: tuple(steps) for param, steps in places.items()}, tuple(queue))


def persistent(numels: Sequence[int], limits: Limits) -> set[int]:
    """Parameters that stay gathered. Source: parameter_offload.py, mark_persistent_parameters."""
    found, total = set(), 0
    for param, numel in enumerate(numels):
        if numel <= limits.persist and numel + total <= limits.persist_total:
            found.add(param)
            total += numel
    return found


class _Flat:
    """A flat buffer, which lives until the last of its parameters has been waited for."""

    __slots__ = ("copied", "params", "size", "waiting")

    def __init__(self, params: list[int], size: int):
        self.params, self.size, self.waiting, self.copied = params, size, len(params), False


class _Coordinator:
    def __init__(
        self, order: Uses, held: Sequence[Sequence[int]], numels: Sequence[int], limits: Limits, flattens: bool
    ):
        self.order, self.modules, self.numels, self.limits, self.flattens = order, held, numels, limits, flattens
        self.persistent = persistent(numels, limits)
        self.status = [_THERE if param in self.persistent else _ABSENT for param in range(len(numels))]
        self.coming: dict[int, _Flat | None] = {}
        self.active: dict[int, set[int]] = {}
        self.queue = deque(order.queue)
        self.fetched_for = [-(10**10)] * len(numels)
        self.step = self.available = 0
        self.whole = self.flat = self.saved = 0
        self.fullest = (0, 0, 0)
        self.kept: set[int] = set()
        """Parameters of which autograd has the storage that they had in forward."""
        self.let_go: list[int] = []

    def enter(self, module: int) -> None:
        """fetch_sub_module: gather what it needs, wait for it, gather what comes next."""
        self.fullest = (self.whole, self.flat, self.saved)
        wanted = self.modules[module]
        if wanted:
            self._gather([param for param in wanted if self.status[param] == _ABSENT])
            for param in wanted:
                self.active.setdefault(param, set()).add(module)
                if self.status[param] == _COMING or param in self.coming:
                    self._wait(param)
            fresh = {param for param in wanted if self.fetched_for[param] < self.step}
            while self.queue and fresh:
                param, step = self.queue.popleft()
                self.fetched_for[param] = step
                fresh.discard(param)
        self._prefetch()
        self.step += 1

    def leave(self, module: int) -> None:
        """release_sub_module: drop what no module near in the order needs again."""
        self.fullest = (self.whole, self.flat, self.saved)
        self.let_go = []
        for param in self.modules[module]:
            users = self.active.get(param)
            if users:
                users.discard(module)
            if self.status[param] == _THERE and not users and self._releasable(param):
                self.status[param] = _ABSENT
                self.whole -= self.numels[param]
                self.available -= self.numels[param]
                self.let_go.append(param)

    def keep(self, param: int) -> None:
        if param not in self.kept:
            self.kept.add(param)
            self.saved += self.numels[param]

    def forget(self, param: int) -> None:
        if param in self.kept:
            self.kept.discard(param)
            self.saved -= self.numels[param]

    def _releasable(self, param: int) -> bool:
        if param in self.persistent or self.fetched_for[param] > self.step:
            return False
        later = next((step for step in self.order.next_use[param] if step >= self.step), None)
        if later is None:
            return True
        return self.order.before[later] - self.order.before[self.step] >= self.limits.reuse

    def _prefetch(self) -> None:
        if not self.limits.prefetch:
            return
        room = min(self.limits.live - self.available, self.limits.prefetch)
        chosen: list[int] = []
        numel = 0
        while self.queue and numel < room:
            param, step = self.queue.popleft()
            self.fetched_for[param] = max(self.fetched_for[param], step)
            if self.status[param] == _ABSENT and param not in chosen:
                chosen.append(param)
                numel += self.numels[param]
        self._gather(chosen)

    def _gather(self, params: list[int]) -> None:
        if not params:
            return
        self.available += sum(self.numels[param] for param in params)
        flat: _Flat | None = None
        if len(params) == 1 or not self.flattens:  # arrives where it stays
            self.whole += sum(self.numels[param] for param in params)
        else:
            flat = _Flat(params, sum(self.numels[param] for param in params))
            self.flat += flat.size
        for param in params:
            self.status[param] = _COMING
            self.coming[param] = flat
        self._see()

    def _wait(self, param: int) -> None:
        flat = self.coming.pop(param)
        if flat is None:
            self.status[param] = _THERE
            return
        if not flat.copied:
            flat.copied = True
            for each in flat.params:
                self.status[each] = _THERE
                self.whole += self.numels[each]
            self._see()
        flat.waiting -= 1
        if not flat.waiting:
            self.flat -= flat.size

    def _see(self) -> None:
        if self.whole + self.flat + self.saved > sum(self.fullest):
            self.fullest = (self.whole, self.flat, self.saved)


def gathered(
    beats: Beats, limits: Limits, saved: tuple[Saved, ...] = (), *, flattens: bool = True
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(inside, after): [mark, column] beside the persistent parameters; inside is the fullest moment of the mark.

    saved: weights that autograd keeps whole, where it does. flattens: several arrive in one buffer; on one rank each is
    copied from the host by itself (partition_parameters.py, NoGatherCoalescedHandle).

    Remembered: no batch, degree or optimizer matters to it, since padding to whole shards is left out.
    """
    key = (id(beats), limits, bool(saved), flattens)
    found = _remembered.get(key)
    if found is None or found[0] is not beats:
        if len(_remembered) > 256:
            _remembered.clear()
        made = _gathered(beats.marks, beats.module_params, beats.numels, limits, saved, flattens)
        found = _remembered[key] = (beats, made)
    return found[1]


_remembered: dict[tuple[int, Limits, bool, bool], tuple[Beats, tuple[NDArray[np.int64], NDArray[np.int64]]]] = {}


def _gathered(
    marks: Sequence[Mark],
    held: Sequence[Sequence[int]],
    numels: Sequence[int],
    limits: Limits,
    saved: Sequence[Saved],
    flattens: bool,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    coordinator = _Coordinator(uses(marks, held, numels), held, numels, limits, flattens)
    inside, after = [], []
    spans = {each.param: each for each in saved}
    done: dict[int, list[int]] = {}
    for each in saved:
        done.setdefault(each.end, []).append(each.param)
    for mark, (kind, module) in enumerate(marks):
        if kind == ENTER:
            coordinator.enter(module)
        elif kind == LEAVE:
            coordinator.leave(module)
            for param in coordinator.let_go:
                if param in spans and spans[param].begin <= mark < spans[param].end:
                    coordinator.keep(param)
        else:
            coordinator.fullest = (coordinator.whole, coordinator.flat, coordinator.saved)
        inside.append(coordinator.fullest)
        for param in done.get(mark, ()):
            coordinator.forget(param)
        after.append((coordinator.whole, coordinator.flat, coordinator.saved))
    return np.array(inside, dtype=np.int64), np.array(after, dtype=np.int64)
