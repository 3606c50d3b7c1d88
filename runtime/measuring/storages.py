"""Live bytes of tensor storages, seen as they come and go: the one instrument under tracing, rehearsal and the meter."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HOST = "host"
"""The category of what lives in the host's memory: told by who puts it there, since on a CPU all memory is the host's."""


class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of every storage that is made while the mode is on, by category, until it is freed.

    `category` names what new storages are; set it as the program moves on. `add` registers what existed before,
    `relabel` renames. Storages that FSDP2 empties with `resize_(0)` and fills again are followed. Meta tensors hold no
    bytes and do not count. After each growth `on_growth` is called, for the peak.
    """

    def __init__(self, on_growth: Callable[[], None] | None = None):
        super().__init__()  # type: ignore[no-untyped-call]
        self.category = "other"
        self.live: dict[str, int] = {}
        self.total_bytes = 0
        """Of the device: all categories but HOST."""
        self.host_peak_bytes = 0
        self.on_growth = on_growth
        self.on_change: Callable[[int, int], None] | None = None
        """Told every change: (key of the storage, bytes). A new name is all its bytes away and back."""
        self._held: dict[int, tuple[int, str, weakref.ref[Any]]] = {}

    def add(self, tensor: torch.Tensor, category: str) -> None:
        """Count a tensor that exists already (a DTensor by its local part). Counted storages keep their category."""
        for storage in _storages(tensor):
            self._see(storage, category)

    def relabel(self, tensor: torch.Tensor, category: str) -> None:
        """Count the tensor's storage under this category from now on, whatever it was."""
        for storage in _storages(tensor):
            key = storage._cdata
            if key in self._held:
                num_bytes, old, ref = self._held[key]
                self._change(key, old, -num_bytes)
                self._held[key] = (num_bytes, category, ref)
                self._change(key, category, num_bytes)
            else:
                self._see(storage, category)

    def held(self) -> Iterator[tuple[int, int]]:
        """(key, bytes) of every storage that is counted now."""
        return ((key, num_bytes) for key, (num_bytes, _, _) in self._held.items())

    def category_of(self, tensor: torch.Tensor) -> str | None:
        """The category under which the tensor's storage is counted; None where it is not."""
        for storage in _storages(tensor):
            held = self._held.get(storage._cdata)
            return held[1] if held else None
        return None

    def __enter__(self) -> StorageTracker:
        self._resize = torch.UntypedStorage.resize_

        tracker, original = self, torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            tracker._resized(storage)
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]
        return super().__enter__()  # type: ignore[no-any-return,no-untyped-call]

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(kind, value, traceback)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local operations come back here
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor):
                for storage in _storages(leaf):
                    self._see(storage, self.category)
        return result

    def _see(self, storage: torch.UntypedStorage, category: str) -> None:
        key = storage._cdata
        if key in self._held:
            if self._held[key][0] != storage.nbytes():
                self._resized(storage)
            return
        num_bytes = storage.nbytes()
        self._held[key] = (num_bytes, category, weakref.ref(storage, lambda _, key=key: self._freed(key)))  # type: ignore[misc]
        self._change(key, category, num_bytes)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        held = self._held.get(storage._cdata)
        if held is None:
            self._see(storage, self.category)
            return
        old_bytes, category, ref = held
        self._held[storage._cdata] = (storage.nbytes(), category, ref)
        self._change(storage._cdata, category, storage.nbytes() - old_bytes)

    def _freed(self, key: int) -> None:
        num_bytes, category, _ = self._held.pop(key)
        self._change(key, category, -num_bytes)

    def _change(self, key: int, category: str, delta: int) -> None:
        """Every change of live bytes passes here; key tells the storage for as long as it lives."""
        self.live[category] = self.live.get(category, 0) + delta
        if category == HOST:
            self.host_peak_bytes = max(self.host_peak_bytes, self.live[HOST])
            return
        self.total_bytes += delta
        if self.on_change is not None:
            self.on_change(key, delta)
        if delta > 0 and self.on_growth is not None:
            self.on_growth()


def _storages(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    if tensor.device.type == "meta":
        return
    try:
        yield tensor.untyped_storage()
    except NotImplementedError:  # sparse and other layouts without a storage: count their parts
        if tensor.layout is torch.sparse_coo:
            yield from _storages(tensor._indices())
            yield from _storages(tensor._values())
