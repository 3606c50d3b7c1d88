"""The real data that a recorded step meets: made fake, and of another batch where that is asked for."""

from __future__ import annotations

from typing import Any

import torch
from dsplan.planner.tracing.timeline import Timeline
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary


class Resize(TorchFunctionMode):
    """Real tensors that meet the recorded step become fake; those of the fed batch at the asked micro_batch.

    A tensor belongs to the batch where its first dim is the fed batch. One that merely holds the batch in a product
    (labels that were flattened before) is left, and refused by name where the step then fails.
    """

    def __init__(self, mode: FakeTensorMode, fed: int | None, asked: int | None, device: str = "cpu"):
        super().__init__()
        self._mode = mode
        self._device = device
        self.fed = fed
        self.asked = asked
        self._memo: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.timeline: Timeline | None = None
        self._true = WeakIdKeyDictionary()

    def convert(self, value: Any) -> Any:
        return tree_map(self._one, value)

    def left_as_they_were(self) -> list[torch.Tensor]:
        """Tensors of the step that may hold the batch in their first dim, in a product."""
        originals = [original for original, _ in self._memo.values()]
        return [
            tensor
            for tensor in originals
            if self.fed and tensor.dim() and tensor.shape[0] > self.fed and tensor.shape[0] % self.fed == 0
        ]

    def _one(self, leaf: Any) -> Any:
        if type(leaf) not in (torch.Tensor, nn.Parameter) or leaf.is_meta:
            return leaf
        if id(leaf) not in self._memo:
            shape = list(leaf.shape)
            if self.asked is not None and shape and shape[0] == self.fed:
                shape[0] = self.asked
            with self._mode, torch.no_grad():
                made = (
                    torch.empty(shape, dtype=leaf.dtype, device=self._device)
                    if shape != list(leaf.shape) or self._device != "cpu"
                    else self._mode.from_tensor(leaf)
                )
            self._memo[id(leaf)] = (leaf, made)
            if self.timeline is not None:  # labels, say: on the device before, though first seen now
                self.timeline.add(made, "other")
        return self._memo[id(leaf)][1]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = self.convert(args), self.convert(kwargs or {})
        if func in _VALUE and args[0] in self._true:
            return True
        result = func(*args, **kwargs)
        if func in _FINITE or (func in _ALL and args[0] in self._true):
            self._true[result] = None  # a normal step's loss is finite
        return result


_FINITE = (torch.isfinite, torch.Tensor.isfinite)
_ALL = (torch.all, torch.Tensor.all)
_VALUE = (torch.Tensor.__bool__, torch.Tensor.item)
