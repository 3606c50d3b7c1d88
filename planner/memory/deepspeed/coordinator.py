"""The order in which stage 3 gathers parameters and lets them go, as requests of the allocator."""

from __future__ import annotations

from collections.abc import Sequence

from dsplan.planner.memory.asking_rank import GATHER, AskingRank, Event
from dsplan.schemas.trace import Param


class Coordinator:
    """Stage 3's fetching: what a module needs, and ahead of it a prefetch bucket at each module, while live ones allow.

    Source: deepspeed/runtime/zero/partitioned_param_coordinator.py, fetch_sub_module and release_sub_module;
    partition_parameters.py, AllGatherCoalescedHandle.wait (each parameter is copied out of the flat buffer).
    """

    def __init__(self, requests: AskingRank, segments: Sequence[tuple[int, bool, list[Event]]]):
        self.requests, self.knobs = requests, requests.knobs
        names = requests.trace.events.modules
        places = {name: place for place, name in enumerate(names)}
        self.of_module: dict[int, list[int]] = {}
        for index in requests.held:
            owner = _owner(requests.params[index], places)
            self.of_module.setdefault(places.get(owner, 0), []).append(index)
        self.runs: list[int] = []
        for _, _, events in segments:
            for _, _, _, module in events:
                if module in self.of_module and (not self.runs or self.runs[-1] != module):
                    self.runs.append(module)
        self.numel = {module: sum(requests.sizes[index] for index in held) for module, held in self.of_module.items()}
        self.live_numel = 0
        self.live: dict[int, tuple[int, int]] = {}
        self.flat: dict[int, tuple[list[int], tuple[int, int]]] = {}
        self.persistent: set[int] = set()
        self.begin()

    def begin(self) -> None:
        self.place, self.fetched, self.module = -1, 0, -1

    def enter(self, module: int) -> None:
        """A module's first operation. Nothing happens while the same one goes on, or one without parameters runs."""
        if module == self.module or module not in self.of_module:
            return
        if self.module >= 0:
            self._release(self.module)
        self.module = module
        self.place += 1
        needed = self.of_module[module]
        self._gather([index for index in needed if index not in self.live and index not in self.flat])
        self.fetched = max(self.fetched, self.place + 1)
        ahead: list[int] = []
        room = min(self.knobs.max_live_parameters - self.live_numel, self.knobs.prefetch_bucket_size)
        while self.fetched < len(self.runs) and room > 0:
            for index in self.of_module[self.runs[self.fetched]]:
                if index not in self.live and index not in self.flat and index not in ahead:
                    ahead.append(index)
                    room -= self.requests.sizes[index]
            self.fetched += 1
        self._gather(ahead)
        for index in needed:
            self._wait(index)

    def end(self) -> None:
        for index in list(self.flat):
            self._wait(index)
        for index in [index for index in self.live if index not in self.persistent]:
            self._let_go(index)

    def _gather(self, wanted: list[int]) -> None:
        if not wanted:
            return
        sizes, width = self.requests.sizes, self.requests.width
        self.live_numel += sum(sizes[index] for index in wanted)
        if len(wanted) == 1 or self.requests.degree == 1:  # arrives in the parameter's own storage
            for index in wanted:
                self._hold(index, self.requests.make(width * sizes[index], GATHER))
            return
        buffer = self.requests.make(width * sum(sizes[index] for index in wanted), GATHER)
        group = (list(wanted), buffer)
        for index in wanted:
            self.flat[index] = group

    def _wait(self, index: int) -> None:
        if index not in self.flat:
            return
        group, buffer = self.flat[index]
        for member in group:
            self._hold(member, self.requests.make(self.requests.width * self.requests.sizes[member], GATHER))
            del self.flat[member]
        self.requests.drop(buffer)

    def _hold(self, index: int, made: tuple[int, int]) -> None:
        self.live[index] = made
        if self.requests.sizes[index] <= self.knobs.param_persistence_threshold:
            self.persistent.add(index)
            self.live_numel -= self.requests.sizes[index]

    def _let_go(self, index: int) -> None:
        self.requests.drop(self.live.pop(index))
        self.live_numel -= self.requests.sizes[index]

    def _release(self, module: int) -> None:
        """Let go unless it is used again within max_reuse_distance."""
        soon: set[int] = set()
        travelled = 0
        for place in range(self.place + 1, len(self.runs)):
            if travelled >= self.knobs.max_reuse_distance or self.runs[place] == module:
                soon.update(self.of_module[module] if self.runs[place] == module else ())
                break
            travelled += self.numel[self.runs[place]]
        for index in self.of_module[module]:
            if index in self.live and index not in soon and index not in self.persistent:
                self._let_go(index)


def _owner(param: Param, places: dict[str, int]) -> str:
    """The innermost module of those named that holds the parameter."""
    name = param.name
    while "." in name:
        name = name.rpartition(".")[0]
        if name in places:
            return name
    return ""
