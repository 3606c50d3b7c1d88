"""Watches one optimizer step of an engine from inside: live bytes by category and phase, and every collective.

The same watch serves a real run (the meter) and a rehearsal on fake tensors.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from dsplan.runtime.measuring.observing import Observer
from dsplan.runtime.measuring.storages import HOST, StorageTracker
from dsplan.schemas.ledger import CATEGORIES, Category, Collective, Ledger, Level, MemoryItem, Moment, Phase
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from dsplan.runtime.engine import Engine

COLLECTIVES = {
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "broadcast_": "broadcast",
    "alltoall_base_": "all_to_all",
    "send": "send",
    "recv_any_source_": "recv",
    "recv_": "recv",
}
BACKEND_SECONDS = 2.0
"""How long the watch waits for a backend's thread to let go of a buffer, before it gives that up."""
OF_BACKENDS: tuple[Category, ...] = ("buckets", "grads")
"""What a backend may still hold between two phases: what it sends, and at stage 0 the gradients that it reduced in place."""

WHY: dict[Category, str] = {
    "params": "parameters and buffers as they lie between steps",
    "grads": "gradients, whole or sharded",
    "optimizer": "optimizer state",
    "activations": "inputs, and all that forward and backward make and keep",
    "gathered_params": "parameters gathered whole for use, and the buffers they arrive in",
    "buckets": "buffers of gradient reduction",
    "temporary": "what the optimizer step makes and drops, and what no other line explains",
}


class CountingTracker(StorageTracker):  # type: ignore[no-untyped-call]
    """StorageTracker that counts collectives, and takes no notice of what a backend allocates inside one.

    gloo's reduce-scatter copies its input; NCCL's does not, so that such a copy is not the engine's.
    """

    def __init__(self, on_growth: Callable[[], None] | None = None):
        super().__init__(on_growth)
        self.collectives: dict[str, tuple[int, int]] = {}
        self.inside_backend = False
        """While true, storages that come up are a backend's own, or stand for shapes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return func(*args)  # of fake tensors: three of four calls, and nothing is made
        if func.namespace != "c10d" and not self.inside_backend:
            return super().__torch_dispatch__(func, types, args, kwargs)
        kind = COLLECTIVES.get(func._opname) if func.namespace == "c10d" else None
        if kind is not None:
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            # All-gather and reduce-scatter hand over the full tensor and this rank's part; the full one counts.
            payload = max((tensor.numel() * tensor.element_size() for tensor in tensors), default=0)
            if kind == "all_reduce" and all(tensor.numel() == 1 for tensor in tensors):
                kind = "scalar_all_reduce"  # norms and flags: bookkeeping, not a gradient
            count, total = self.collectives.get(kind, (0, 0))
            self.collectives[kind] = (count + 1, total + payload)
        return func(*args, **(kwargs or {}))


@dataclass
class _Peak:
    total: int = -1
    live: dict[str, int] = field(default_factory=dict)
    where: str = ""


class StepWatch(Observer):
    """From the first forward of an optimizer step to its end. `start` it, let it be the engine's observer for one step (or pass
    an observer's calls on), then ask for its `ledger`."""

    def __init__(self, engine: Engine, tracker: CountingTracker | None = None):
        self._engine = engine
        self.tracker = tracker or CountingTracker()
        self.tracker.on_growth = self._grew
        self._peaks: dict[Phase, _Peak] = {}
        self._phase: Phase | None = None
        self._unit = ""
        self._undo: list[Callable[[], None]] = []
        self._state_bytes_before = 0
        self._resident = 0
        self._patient = engine.device.type == "cpu" and dist.get_backend() != "fake"

    @property
    def running(self) -> bool:
        return bool(self._undo)

    def start(self) -> None:
        """Register what exists and begin to follow what comes."""
        self._label_state()
        self._state_bytes_before = self.tracker.live.get("optimizer", 0)
        self._follow_fsdp()
        self.tracker.__enter__()
        self._undo.append(lambda: self.tracker.__exit__(None, None, None))

    def forward_begins(self, inputs: list[torch.Tensor]) -> None:
        for tensor in inputs:
            if tensor.device == self._engine.device:
                self.tracker.add(tensor, "activations")
        self._enter("forward", "activations")

    def backward_begins(self) -> None:
        self._follow_gradients()
        self._enter("backward", "activations")

    def step_begins(self) -> None:
        on_host = all(member.offload_to_cpu for group in _groups(self._engine) for member in group.fsdp_params)
        self._enter("step", HOST if on_host else "temporary")

    def step_ends(self) -> None:
        self.stop()

    def stop(self) -> None:
        """End of the step: gradients are gone, states exist."""
        while self._undo:
            self._undo.pop()()
        self._wait_for_backend(*OF_BACKENDS)
        self._label_state()
        peak = self._peaks.get("step")
        if peak is not None:  # states that this very step made were taken for temporaries
            fresh = self.tracker.live.get("optimizer", 0) - self._state_bytes_before
            fresh = max(0, min(fresh, peak.live.get("temporary", 0)))
            peak.live["temporary"] = peak.live.get("temporary", 0) - fresh
            peak.live["optimizer"] = peak.live.get("optimizer", 0) + fresh
        keep: tuple[Category, ...] = ("params", "grads", "optimizer", "gathered_params", "buckets")
        self._resident = sum(self.tracker.live.get(category, 0) for category in keep)

    def ledger(self, level: Level, allocated: dict[Phase, int] | None = None) -> Ledger:
        """The step's ledger. allocated: per phase, what the device's allocator counted at its peak, where it counts."""
        moments = []
        for phase, peak in self._peaks.items():
            live = {category: peak.live.get(category, 0) for category in CATEGORIES}
            if allocated and phase in allocated:
                _fit(live, allocated[phase])
            items = tuple(
                MemoryItem(category=category, bytes=live[category], why=WHY[category])
                for category in CATEGORIES
                if live[category]
            )
            moments.append(Moment(phase=phase, where=peak.where, items=items))
        collectives = tuple(
            Collective(kind=kind, count=count, payload_bytes=payload)
            for kind, (count, payload) in sorted(self.tracker.collectives.items())
        )
        return Ledger(
            engine="native",
            level=level,
            moments=tuple(moments),
            resident_bytes=self._resident,
            host_bytes=self.tracker.host_peak_bytes,
            collectives=collectives,
        )

    def _enter(self, phase: Phase, category: str) -> None:
        self._wait_for_backend(*OF_BACKENDS)
        self._phase = phase
        self.tracker.category = category
        self._unit = ""
        self._grew()

    def _wait_for_backend(self, *categories: Category) -> None:
        """gloo's threads let go of a buffer a little after FSDP2 does: give them the time, so that no peak depends on it."""
        deadline = time.monotonic() + BACKEND_SECONDS
        for category in categories:
            while self._patient and self.tracker.live.get(category, 0) > self._held_by_fsdp(category):
                time.sleep(0.0005)
                self._patient = time.monotonic() < deadline

    def _held_by_fsdp(self, category: Category) -> int:
        """Bytes of the buffers and gradients that FSDP2 and the parameters themselves still refer to."""
        tensors: list[torch.Tensor | None] = [parameter.grad for parameter in self._engine.module.parameters()]
        for group in _groups(self._engine):
            gathering, reducing = group._all_gather_result, group._all_reduce_state
            tensors += [gathering.all_gather_output if gathering else None, group._partial_reduce_output]
            tensors.append(reducing.all_reduce_input if reducing else None)
            for member in group.fsdp_params:
                tensors += getattr(member, "all_gather_outputs", ())
                tensors += [member.sharded_param.grad, member.unsharded_accumulated_grad]
                whole = getattr(member, "_unsharded_param", None)
                tensors.append(whole.grad if whole is not None else None)
        context = group.comm_ctx  # shared by all, and filled in the first forward
        arriving = getattr(context, "all_gather_state", None)
        if arriving is not None:
            tensors.append(arriving.all_gather_result.all_gather_output)
        tensors += [state.reduce_scatter_input for state in getattr(context, "reduce_scatter_states", ())]
        storages = {
            tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
            for tensor in tensors
            if tensor is not None and self.tracker.category_of(tensor) == category
        }
        return sum(storages.values())

    def _grew(self) -> None:
        if self._phase is None:
            return
        peak = self._peaks.setdefault(self._phase, _Peak())
        if self.tracker.total_bytes > peak.total:
            peak.total = self.tracker.total_bytes
            peak.live = dict(self.tracker.live)
            peak.where = f"{self._phase} of {self._unit}" if self._unit else self._phase

    def _label_state(self) -> None:
        module, optimizer = self._engine.module, self._engine.optimizer
        on_host: set[int] = set()  # by id, the parameters whose masters, gradients and states are on the host
        for group in _groups(self._engine):
            for member in group.fsdp_params:
                self.tracker.relabel(member.sharded_param.detach(), HOST if member.offload_to_cpu else "params")
                on_host |= {id(member.sharded_param)} if member.offload_to_cpu else set()
        for parameter in module.parameters():
            self.tracker.add(parameter.detach(), "params")
            if parameter.grad is not None:
                self.tracker.relabel(parameter.grad, HOST if id(parameter) in on_host else "grads")
        for buffer in module.buffers():
            self.tracker.relabel(buffer, "params")
        for owner, state in optimizer.state.items() if optimizer is not None else ():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    self.tracker.relabel(value, HOST if id(owner) in on_host else "optimizer")

    def _follow_fsdp(self) -> None:
        """What FSDP2 makes while it gathers or reduces is named after that, whichever phase it is."""
        self._wrap("unshard", "gathered_params")
        self._wrap("wait_for_unshard", "gathered_params", before=self._name_unit)
        self._wrap("post_backward", "buckets", after=self._name_gradients)
        self._close_eyes_in(DefaultReduceScatter, "__call__")
        self._close_eyes_in(ShardingPropagator, "_propagate_tensor_meta_non_cached")

    def _wrap(
        self,
        method: str,
        category: Category,
        before: Callable[[FSDPParamGroup], None] | None = None,
        after: Callable[[FSDPParamGroup], None] | None = None,
    ) -> None:
        original = getattr(FSDPParamGroup, method)
        tracker = self.tracker

        @functools.wraps(original)
        def wrapped(group: FSDPParamGroup, *args: Any, **kwargs: Any) -> Any:
            if before is not None:
                before(group)
            outer, tracker.category = tracker.category, category
            try:
                return original(group, *args, **kwargs)
            finally:
                tracker.category = outer
                if after is not None:
                    after(group)
                self._wait_for_backend(category)

        setattr(FSDPParamGroup, method, wrapped)
        self._undo.append(lambda: setattr(FSDPParamGroup, method, original))

    def _close_eyes_in(self, owner: Any, method: str) -> None:
        """What comes up in that method takes no memory of the step's.

        In reduce-scatter gloo's copy of the input comes up only as its parts are copied out, after the collective, in wait().
        DTensor asks fake tensors of whole size what shape an operator gives, the first time that it meets it.
        """
        original, tracker = getattr(owner, method), self.tracker

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            outer, tracker.inside_backend = tracker.inside_backend, True
            try:
                return original(*args, **kwargs)
            finally:
                tracker.inside_backend = outer

        setattr(owner, method, wrapped)
        self._undo.append(lambda: setattr(owner, method, original))

    def _name_unit(self, group: FSDPParamGroup) -> None:
        self._unit = group._module_fqn or "the root"

    def _name_gradients(self, group: FSDPParamGroup) -> None:
        for member in group.fsdp_params:
            if member.sharded_param.grad is not None:
                self.tracker.relabel(member.sharded_param.grad, HOST if member.offload_to_cpu else "grads")
            if member.unsharded_accumulated_grad is not None:
                self.tracker.relabel(member.unsharded_accumulated_grad, "grads")

    def _follow_gradients(self) -> None:
        """Whole gradients count as grads from the moment at which autograd hands them over."""

        def handed_over(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                self.tracker.relabel(parameter.grad, "grads")

        for group in _groups(self._engine):
            for member in group.fsdp_params:
                whole = getattr(member, "_unsharded_param", None)
                if whole is not None and whole.requires_grad and not hasattr(whole, "_dsplan_followed"):
                    handle = whole.register_post_accumulate_grad_hook(handed_over)
                    whole._dsplan_followed = True
                    self._undo.append(functools.partial(_unfollow, whole, handle))


def _unfollow(parameter: Any, handle: Any) -> None:
    handle.remove()
    del parameter._dsplan_followed


def _groups(engine: Engine) -> list[FSDPParamGroup]:
    return [group for unit in engine.units for group in unit._get_fsdp_state()._fsdp_param_groups]


def _fit(live: dict[Category, int], total: int) -> None:
    """Make the categories add up to what the allocator counted: it rounds up, and holds what the watch did not see made."""
    difference = total - sum(live.values())
    live["temporary"] += difference
    if live["temporary"] < 0:
        live["activations"] = max(0, live["activations"] + live["temporary"])
        live["temporary"] = 0
