"""Values that tensors without values still have: constants, and choices of experts, which are taken as balanced."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

aten: Any = torch.ops.aten

LARGEST_CONSTANT, LARGEST = 2**24, 2**26
"""Elements of an integer tensor whose values are kept: made from nothing; followed from others."""


class _Known(NamedTuple):
    value: torch.Tensor
    choice: tuple[int, int] | None
    """(taken, of how many): the top-k that it goes back to; None for constants."""


class KnownValues:
    """Follows the values of integer and bool tensors that come from constants and from choices of the largest (topk, argmax).

    Row r of a choice of k among n takes (r k + j) mod n, j < k: each of the n is chosen equally often. So rows that are
    picked by what was chosen (nonzero, masks, bincount, split by counts) have shapes: rows x k / n for each of n experts.
    """

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._known: MutableMapping[torch.Tensor, _Known] = WeakTensorKeyDictionary()

    def item(self, tensor: torch.Tensor) -> bool | int | float | None:
        """What `.item()` gives; None where it is not known."""
        known = self._known.get(tensor)
        if known is None:
            return None
        self._tell(known)
        with _disable_current_modes():
            return known.value.item()

    def call(self, func: Any, /, *args: Any, **kwargs: Any) -> Any:
        """What an operation on fake tensors gives."""
        if func in _CHOICES:
            result = func(*args, **kwargs)
            self._choose(func, args, kwargs, result)
            return result
        shaped = _BY_VALUES.get(func)
        if shaped is not None:
            result = shaped(self, func, args, kwargs)
            if result is not None:
                return result
        result = func(*args, **kwargs)
        first = result[0] if isinstance(result, (tuple, list)) and result else result
        if isinstance(first, FakeTensor):
            if first.dtype in _COUNTING:
                self._follow(func, args, kwargs, result)
            elif func in _SCATTERS:
                self._scatter(args, result)
            elif len(self._known) and first in self._known:
                del self._known[first]
        return result

    def _choose(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        scores = args[0]
        indices = result if isinstance(result, torch.Tensor) else result[1]
        if not isinstance(indices, FakeTensor) or not scores.dim() or indices.numel() > LARGEST:
            return
        if scores in self._known:
            self._follow(func, args, kwargs, result)
            return
        dim = _CHOICES[func](args, kwargs)
        if dim is None:
            return
        dim %= scores.dim()
        among = scores.shape[dim]
        kept = indices.shape[dim] if indices.dim() == scores.dim() else 1
        if not among or not kept:
            return
        with _disable_current_modes():
            rows = scores.numel() // among
            step = kept if kept < among else 1
            chosen = (torch.arange(rows)[:, None] * step + torch.arange(kept)) % among
            others = [length for at, length in enumerate(scores.shape) if at != dim]
            value = chosen.view(*others, kept).movedim(-1, dim).reshape(indices.shape)
            self._known[indices] = _Known(value, (kept, among))

    def _follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Values of the result where those of all tensors that go in are known."""
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, FakeTensor)]
        taken = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        largest = LARGEST if taken else LARGEST_CONSTANT
        known = [self._known_of(leaf) for leaf in taken]
        told = all(known) if taken else func in _CONSTANTS
        if not told or sum(leaf.numel() for leaf in made) > largest:
            if func._schema.is_mutable:
                self._forget(made)
            return
        values = self._values_of(func, args, kwargs)
        choice = next((found.choice for found in known if found and found.choice), None)
        for leaf, value in zip(made, values, strict=True):
            self._known[leaf] = _Known(value, choice)

    def _values_of(self, func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
        real_args, real_kwargs = tree_map(self._real, (args, kwargs))
        with _disable_current_modes():
            return [leaf for leaf in tree_leaves(func(*real_args, **real_kwargs)) if isinstance(leaf, torch.Tensor)]

    def _known_of(self, tensor: torch.Tensor) -> _Known | None:
        if type(tensor) is torch.Tensor and tensor.device.type == "cpu":  # of numbers: torch.tensor([2, 3])
            return _Known(tensor, None)
        return self._known.get(tensor)

    def _real(self, leaf: Any) -> Any:
        known = self._known_of(leaf) if isinstance(leaf, torch.Tensor) else None
        return leaf if known is None else known.value

    def _forget(self, written: list[FakeTensor]) -> None:
        storages = {leaf.untyped_storage()._cdata for leaf in written}
        for held in list(self._known):
            if held.untyped_storage()._cdata in storages:
                del self._known[held]

    def _scatter(self, args: Any, result: FakeTensor) -> None:
        """Weights laid where they were chosen (the gates of a sparse mixture): 1 there and 0 elsewhere."""
        known = self._known.get(args[2])
        if known is None or result.numel() > LARGEST:
            return
        with _disable_current_modes():
            value = torch.zeros(result.shape).scatter(args[1], known.value, 1.0)
        self._known[result] = _Known(value, known.choice)

    def _tell(self, known: _Known) -> None:
        if known.choice is None:
            return
        kept, among = known.choice
        self.notes.append(
            f"which of {among} experts a token takes depends on the data: each is taken to get its equal share, "
            f"tokens x {kept} / {among}"
        )

    def _wrapped(self, values: list[torch.Tensor], known: _Known) -> list[torch.Tensor]:
        self._tell(known)
        made = []
        for value in values:
            fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
            self._known[fake] = _Known(value, known.choice)
            made.append(fake)
        return made

    def _all_by_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        taken = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        known = [self._known.get(leaf) for leaf in taken]
        if not taken or not all(known):
            return None
        chosen = next((found for found in known if found and found.choice), known[0])
        assert chosen is not None
        made = self._wrapped(self._values_of(func, args, kwargs), chosen)
        return made[0] if len(made) == 1 else tuple(made)

    def _counts(self, func: Any, args: Any, kwargs: Any) -> Any:
        """bincount: as many as minlength, which is to cover what is counted."""
        found = self._all_by_values(func, args, kwargs)
        minlength = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
        if found is None and minlength:
            return torch.empty(minlength, dtype=torch.int64, device="cpu")
        return found

    def _masked(self, func: Any, args: Any, kwargs: Any) -> Any:
        """tensor[mask]: the mask as what nonzero makes of it."""
        indices: list[Any] = []
        for index in args[1]:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                indices.append(index)
                continue
            known = self._known.get(index)
            if known is None:
                return None
            with _disable_current_modes():
                columns = list(known.value.nonzero(as_tuple=True))
            indices += self._wrapped(columns, known)
        result = func(args[0], indices)
        if result.dtype in _COUNTING:
            self._follow(func, (args[0], indices), {}, result)
        return result

    def _selected(self, func: Any, args: Any, kwargs: Any) -> Any:
        known = self._known.get(args[1])
        if known is None or args[0].shape != args[1].shape:
            return None
        self._tell(known)
        with _disable_current_modes():
            rows = int(known.value.sum())
        return torch.empty(rows, dtype=args[0].dtype, device="cpu")


_COUNTING = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_SCATTERS = (aten.scatter.src, aten.scatter_.src, aten.scatter.value, aten.scatter_.value)
_CONSTANTS = {
    aten.full.default, aten.zeros.default, aten.ones.default, aten.arange.default, aten.arange.start,
    aten.arange.start_step, aten.scalar_tensor.default,
}  # fmt: skip


def _dim(place: int, default: int | None) -> Callable[[Any, Any], int | None]:
    def told(args: Any, kwargs: Any) -> int | None:
        return args[place] if len(args) > place else kwargs.get("dim", default)  # type: ignore[no-any-return]

    return told


_CHOICES: dict[Any, Callable[[Any, Any], int | None]] = {
    aten.topk.default: _dim(2, -1),
    aten.argmax.default: _dim(1, None),
    aten.max.dim: _dim(1, None),
    aten.sort.default: _dim(1, -1),
    aten.sort.stable: _dim(2, -1),
    aten.argsort.default: _dim(1, -1),
}
"""Where each takes its dim."""

_BY_VALUES: dict[Any, Callable[[KnownValues, Any, Any, Any], Any]] = {
    aten.nonzero.default: KnownValues._all_by_values,
    aten._unique2.default: KnownValues._all_by_values,
    aten.unique_dim.default: KnownValues._all_by_values,
    aten.unique_consecutive.default: KnownValues._all_by_values,
    aten.repeat_interleave.Tensor: KnownValues._all_by_values,
    aten.bincount.default: KnownValues._counts,
    aten.index.Tensor: KnownValues._masked,
    aten.masked_select.default: KnownValues._selected,
}
"""What makes a shape of values."""
