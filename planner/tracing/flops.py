"""Forward FLOPs per unit: fvcore on meta tensors; where it cannot trace, torch's counter on fake ones, as flops_source says."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from dsplan.planner.models.weightless import Inputs, fakes, lent_weights, metas, stand_in
from dsplan.planner.tracing.kernels import NormalValues
from dsplan.planner.tracing.operators import COUNTER_FORMULAS, FLOPS_PER_MAC, HANDLES, MetaConvolutions
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

FVCORE, FLOP_COUNTER, UNKNOWN = "fvcore", "flop counter", "unknown"

_NORMS = ("batch_norm", "group_norm", "layer_norm", "instance_norm")
_NOT_COUNTED = (*_NORMS, "upsample_nearest2d", "upsample_bilinear2d", "adaptive_avg_pool2d", "grid_sampler")
"""fvcore counts these as elementwise work in the same total; bytes, not FLOPs, bound them."""

_MATMUL_LIKE = (
    "mm",
    "matmul",
    "linear",
    "conv",
    "attention",
    "einsum",
    "dot",
    "addmv",
    "mv",
    "lstm",
    "gru",
    "rnn",
    "bilinear",
)
_HARMLESS = ("cdist", "normal", "removed", "commit", "comm")


@dataclass(frozen=True, slots=True)
class Flops:
    """FLOPs of one forward: units as in Trace.units."""

    units: tuple[float, ...]
    source: str
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> float | None:
        return sum(self.units) if self.source != UNKNOWN else None


def forward_flops(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], inputs: Inputs) -> Flops:
    """FLOPs of one forward, per unit. Of the model and its inputs shapes alone are used.

    Attention counts as a full square of the sequence, causal or not. An operator that multiplies matrices and has no
    handle is named in the notes. All in bf16: the fused experts' kernel takes nothing else, and it changes no count.
    """
    try:
        return _by_fvcore(model, blocks, inputs)
    except Exception:
        pass  # control flow that depends on values, and what else torch.jit cannot trace
    try:
        return _by_counter(model, blocks, inputs)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return Flops(
            (0.0,) * (len(blocks) + 1),
            UNKNOWN,
            (f"FLOPs are not known: the model cannot be traced for them ({reason})",),
        )


def _by_fvcore(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], inputs: Inputs) -> Flops:
    metas_only = metas(torch.bfloat16)
    with lent_weights(model, metas_only), torch.no_grad():
        on_meta = stand_in(inputs, metas_only)
        repeats = Repeats(blocks)
        macs, unknown = _fvcore_macs(model, on_meta, repeats)
        if repeats.unsure:
            macs, unknown = _fvcore_macs(model, on_meta, Repeats(()))
    notes = [f"FLOPs: {name} ({count} times) has no formula and counts as 0" for name, count in sorted(unknown.items())]
    return _flops(lambda name: macs.get(name, 0.0), blocks, FVCORE, notes)


def _by_counter(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], inputs: Inputs) -> Flops:
    """By torch's FlopCounterMode on fake cpu tensors."""
    from torch.utils.flop_counter import FlopCounterMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes_only = fakes(mode, torch.bfloat16)
    counter = FlopCounterMode(display=False, custom_mapping=COUNTER_FORMULAS)
    values = NormalValues()  # type: ignore[no-untyped-call]
    with lent_weights(model, fakes_only), torch.no_grad(), mode, values, counter:
        stand_in(inputs, fakes_only).feed(model)
    root = type(model).__name__
    by_name: dict[str, float] = {}
    for name, found in counter.get_flop_counts().items():
        own = "" if name in (root, "Global") else name.removeprefix(f"{root}.")
        by_name[own] = sum(found.values()) / FLOPS_PER_MAC
    return _flops(lambda name: by_name.get(name, 0.0), blocks, FLOP_COUNTER, [])


def _flops(
    macs: Callable[[str], float], blocks: Sequence[tuple[str, nn.Module]], source: str, notes: Sequence[str]
) -> Flops:
    inside = [FLOPS_PER_MAC * macs(name) for name, _ in blocks]
    return Flops((FLOPS_PER_MAC * macs("") - sum(inside), *inside), source, tuple(notes))


class _Positional(nn.Module):
    """The model behind tensors alone, in order, as torch.jit wants it."""

    def __init__(self, model: nn.Module, inputs: Inputs):
        super().__init__()
        self.model = model
        self.leaves, self.spec = tree_flatten(inputs)
        self.places = [index for index, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]
        self.tensors = tuple(self.leaves[index] for index in self.places)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = list(self.leaves)
        for index, tensor in zip(self.places, tensors, strict=True):
            leaves[index] = tensor
        output = tree_unflatten(leaves, self.spec).feed(self.model)
        return tuple(leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))


def _fvcore_macs(model: nn.Module, inputs: Inputs, repeats: Repeats) -> tuple[dict[str, float], dict[str, int]]:
    """(multiply-adds by module name, matrix operators without a formula)."""
    from fvcore.nn import FlopCountAnalysis

    positional = _Positional(model, inputs)
    analysis = FlopCountAnalysis(positional, positional.tensors)
    analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False).tracer_warnings("none")
    analysis.set_op_handle(**HANDLES)
    logging.getLogger("fvcore.nn.jit_analysis").setLevel(logging.ERROR)
    with MetaConvolutions(), repeats, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        counts = analysis.by_module_and_operator()
        unknown = analysis.unsupported_ops()
    macs = {}
    for name, found in counts.items():
        own = name.removeprefix("model").removeprefix(".") if name != "" else ""
        if name == "model" or name.startswith("model."):
            macs[own] = float(sum(number for operator, number in found.items() if operator not in _NOT_COUNTED))
    repeats.add_to(macs)
    return macs, {name: count for name, count in unknown.items() if _is_matmul_like(name)}


class Repeats:
    """Runs one of several equal blocks; the others hand on outputs of the same shapes, and are counted by the one.

    Equal: same classes, parameter shapes and settings all through, and inputs of the same shapes. unsure: a block ran
    more than once, so that its count is not that of one run.
    """

    def __init__(self, blocks: Sequence[tuple[str, nn.Module]]):
        self._blocks = blocks
        self._ran: dict[Any, tuple[str, Any]] = {}
        self._like: list[tuple[str, str]] = []
        self.unsure = False

    def __enter__(self) -> Repeats:
        self._before = [(block, dict(block.__dict__)) for _, block in self._blocks]
        for name, block in self._blocks:
            block.forward = self._once(name, block.forward, _signature(block))
        return self

    def __exit__(self, *_: object) -> None:
        for block, attributes in self._before:
            block.__dict__.clear()
            block.__dict__.update(attributes)

    def add_to(self, macs: dict[str, float]) -> None:
        """Count the blocks that did not run: for themselves and for all that holds them."""
        for name, first in self._like:
            parts = name.split(".")
            for depth in range(len(parts) + 1):
                holder = ".".join(parts[:depth])
                macs[holder] = macs.get(holder, 0.0) + macs[first]

    def _once(self, name: str, forward: Callable[..., Any], signature: Any) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            key = (signature, _inputs_key(args, kwargs))
            ran = self._ran.get(key)
            if ran is None or ran[0] == name:
                self.unsure |= any(name == other for other, _ in self._ran.values())
                output = forward(*args, **kwargs)
                self._ran[key] = (name, output)
                return output
            self._like.append((name, ran[0]))
            # tied to the inputs, else the trace drops what came before as unused
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            tie = sum((leaf.sum() for leaf in tensors), torch.zeros((), device="meta"))
            return tree_map(
                lambda leaf: torch.empty_like(leaf) + tie.to(leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf,
                ran[1],
            )

        return run


_INDEX_NAMES = ("layer_idx", "layer_id", "layer_number", "layer_index", "block_idx", "index", "idx")


def _signature(block: nn.Module) -> Any:
    """What decides a block's work: classes, shapes and plain settings of it and all it holds, but not its number."""
    parts = []
    for name, module in block.named_modules():
        settings = tuple(
            (key, repr(value))
            for key, value in sorted(module.__dict__.items())
            if isinstance(value, (bool, int, float, str, tuple)) and key not in _INDEX_NAMES
        )
        shapes = tuple((key, tuple(param.shape)) for key, param in module.named_parameters(recurse=False))
        parts.append((name, type(module), settings, shapes))
    return tuple(parts)


def _inputs_key(args: Any, kwargs: Any) -> Any:
    leaves, spec = tree_flatten((args, kwargs))
    return tuple(
        (tuple(map(int, leaf.shape)), leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves
    ), str(spec)


def _is_matmul_like(operator: str) -> bool:
    name = operator.partition("::")[2] or operator
    return any(part in name for part in _MATMUL_LIKE) and not any(part in name for part in _HARMLESS)
