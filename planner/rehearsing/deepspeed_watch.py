"""Watches steps of a DeepSpeed engine from outside: live bytes by category and phase, on the GPU and on the host."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from dsplan.planner.rehearsing.rehearsal import Recording, Rehearsal
from dsplan.planner.tracing.kernels import OF_ENGINES, normal_value
from dsplan.runtime.measuring.storages import StorageTracker
from dsplan.runtime.measuring.watching import COLLECTIVES, WHY
from dsplan.schemas.ledger import CATEGORIES, Collective, Ledger, MemoryItem, Moment, Phase
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

HOST = "host"
"""Category of what lies in host memory."""


class PlacedTracker(StorageTracker):  # type: ignore[no-untyped-call]
    """StorageTracker that names each new storage by the code that makes it, and counts host memory apart, and collectives.

    It answers `.item()` with a normal step's value, so that norms and overflow checks need no values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase: Phase | None = None
        self.device_bytes = 0
        self.host_bytes = 0
        self.on_placed: Callable[[int, str, int], None] | None = None
        self.collectives: dict[str, tuple[int, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # half of all calls
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        if func is torch.ops.aten._local_scalar_dense.default:
            return normal_value(args[0], OF_ENGINES)
        if func.namespace == "c10d" and self.phase is not None:
            self._count(func, args, kwargs)
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                storage = leaf.untyped_storage()
                if storage._cdata not in self._held:
                    self._see(storage, HOST if leaf.device.index is None else self._place())
        return result

    def _count(self, func: Any, args: Any, kwargs: Any) -> None:
        kind = COLLECTIVES.get(func._opname)
        if kind is None:
            return
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        payload = max((tensor.numel() * tensor.element_size() for tensor in tensors), default=0)
        if kind == "all_reduce" and all(tensor.numel() == 1 for tensor in tensors):
            kind = "scalar_all_reduce"
        count, total = self.collectives.get(kind, (0, 0))
        self.collectives[kind] = (count + 1, total + payload)

    def _place(self) -> str:
        """The category by the innermost frame that is not torch's."""
        if self.phase is None:
            return "temporary"
        frame: Any = sys._getframe(2)
        while frame is not None:
            place = _place_of_file(frame.f_code.co_filename)
            if place == "engine":
                place = "activations" if frame.f_code.co_name in _PASSED_ON else "buckets"
            if place is not None:
                return "temporary" if self.phase == "step" and place != "gathered_params" else place
            frame = frame.f_back
        return "temporary" if self.phase == "step" else "activations"

    def _change(self, key: int, category: str, delta: int) -> None:
        self.live[category] = self.live.get(category, 0) + delta
        self.total_bytes += delta
        if category == HOST:
            self.host_bytes += delta
        else:
            self.device_bytes += delta
        if self.on_placed is not None:
            self.on_placed(key, category, delta)


_PASSED_ON = ("forward", "backward", "__call__", "wrapped_fn", "wrapper")
"""Functions of DeepSpeed's engine.py that call the model and autograd."""
_GATHERING = ("partition_parameters.py", "partitioned_param_coordinator.py", "parameter_offload.py")


@functools.cache
def _place_of_file(name: str) -> str | None:
    """What code of this file makes in forward and backward; None: torch's, ours, or a helper that serves many."""
    path = name.replace("\\", "/")
    if "/torch/" in path or path.endswith(("rehearsing/deepspeed_watch.py", "contextlib.py")) or path.startswith("<"):
        return None
    if "/deepspeed/" not in path:
        return "activations"
    if path.endswith(_GATHERING):
        return "gathered_params"
    if path.endswith("/runtime/engine.py"):
        return "engine"
    if path.endswith("/runtime/zero/linear.py"):
        return "activations"
    if "/deepspeed/runtime/" in path and not path.endswith(("/utils.py", "/nvtx.py")):
        return "buckets"
    return None


class DeepSpeedWatch:
    """Ledger of one optimizer step. Enter its tracker before the model gets its weights; `begin` a step, `enter` its phases."""

    def __init__(self) -> None:
        self.tracker = PlacedTracker()
        self.tracker.on_placed = self._changed
        self._engine: Any = None
        self._peaks: dict[Phase, tuple[int, dict[str, int]]] = {}
        self._resident = 0
        self._host = 0
        self._recording: Recording | None = None
        self._stopped = False

    def follow(self, engine: Any) -> None:
        """Gradients are named when autograd hands them over, and again when the optimizer takes them."""
        self._engine = engine
        for param in engine.module.parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(self._handed_over)
        inner = _inner(engine)
        if inner is not None and hasattr(inner, "register_step_pre_hook"):
            inner.register_step_pre_hook(self._taken)

    def begin(self) -> None:
        """What happened before is forgotten, what is held is resident."""
        self._label_state()
        gc.collect()
        tracker = self.tracker
        self._peaks.clear()
        tracker.collectives.clear()
        self._host = tracker.host_bytes
        self._recording = Recording()
        for key, (num_bytes, category, _) in tracker._held.items():
            if category != HOST:
                self._recording.hold(key, num_bytes)

    def enter(self, phase: Phase) -> None:
        self.tracker.phase = phase
        self._grew()

    def end(self) -> None:
        self._stopped = True
        self.tracker.phase = None
        gc.collect()
        self._label_state()
        self._resident = self.tracker.device_bytes - self.tracker.live.get("activations", 0)

    def rehearsal(self, *, counted: bool, offloads: bool) -> Rehearsal:
        """counted: the collectives are those of a whole step. offloads: what lies on the host are states, not some scalars."""
        assert self._recording is not None
        return Rehearsal(
            ledger=self._ledger(counted, self._host if offloads else 0),
            events=tuple(self._recording.events),
            resident=self._recording.resident,
        )

    def _ledger(self, counted: bool, host_bytes: int) -> Ledger:
        moments = []
        for phase, (_, live) in self._peaks.items():
            items = tuple(
                MemoryItem(category=category, bytes=live[category], why=WHY[category])
                for category in CATEGORIES
                if live.get(category)
            )
            moments.append(Moment(phase=phase, where=phase, items=items))
        collectives = tuple(
            Collective(kind=kind, count=count, payload_bytes=payload)
            for kind, (count, payload) in sorted(self.tracker.collectives.items())
        )
        return Ledger(
            engine="deepspeed",
            level="rehearsal",
            moments=tuple(moments),
            resident_bytes=self._resident,
            host_bytes=host_bytes,
            collectives=collectives if counted else (),
        )

    def _changed(self, key: int, category: str, delta: int) -> None:
        if self._recording is None or self._stopped:
            return
        if category == HOST:
            self._host = max(self._host, self.tracker.host_bytes)
            return
        self._recording.change(key, delta)
        if delta > 0:
            self._grew()

    def _grew(self) -> None:
        phase, tracker = self.tracker.phase, self.tracker
        if phase is None or self._recording is None or self._stopped:
            return
        if tracker.device_bytes > self._peaks.get(phase, (-1, {}))[0]:
            self._peaks[phase] = (tracker.device_bytes, dict(tracker.live))

    def _handed_over(self, param: torch.Tensor) -> None:
        if param.grad is not None:
            self._name(param.grad, "grads")

    def _taken(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._name(param.grad, "grads")

    def _name(self, tensor: torch.Tensor, category: str) -> None:
        held = self.tracker.category_of(tensor)
        if held not in (HOST, category):
            self.tracker.relabel(tensor, category)

    def _label_state(self) -> None:
        engine = self._engine
        inner, outer = _inner(engine), engine.optimizer
        for name, value in vars(outer).items() if outer is not None and outer is not inner else ():
            category = _named_like(name)
            if category is not None:
                for tensor in _tensors(value):
                    self._name(tensor, category)
        if inner is not None:
            for group in inner.param_groups:
                for param in group["params"]:
                    self._name(param.detach(), "optimizer")
            for state in list(inner.state.values()):
                for tensor in _tensors(state):
                    self._name(tensor, "optimizer")
        for param in engine.module.parameters():
            self._name(param.detach(), "params")
            shard = getattr(param, "ds_tensor", None)
            if isinstance(shard, torch.Tensor):
                self._name(shard, "params")
            if param.grad is not None:
                self._name(param.grad, "grads")
        for buffer in engine.module.buffers():
            self._name(buffer, "params")


def _inner(engine: Any) -> Any:
    """The torch optimizer inside DeepSpeed's."""
    optimizer = engine.optimizer
    return getattr(optimizer, "optimizer", optimizer)


def _named_like(attribute: str) -> str | None:
    """The category of tensors that DeepSpeed's optimizer holds under such a name."""
    name = attribute.lower()
    if "ipg" in name or "bucket" in name or "temp_grad" in name:
        return "buckets"
    if "grad" in name:
        return "grads"
    if "fp32" in name:
        return "optimizer"
    if any(part in name for part in ("bit16", "fp16", "bf16", "lp_param")):
        return "params"
    return None


def _tensors(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < 4:
        if isinstance(value, dict):
            members: Any = list(value.values())
        elif isinstance(value, (list, tuple)):
            members = value
        else:
            members = [
                member for name in ("buffer", "flat_partition") if (member := getattr(value, name, None)) is not None
            ]
        for member in members:
            yield from _tensors(member, depth + 1)
