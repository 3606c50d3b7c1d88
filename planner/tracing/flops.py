"""Forward FLOPs per unit: fvcore on meta tensors; where it cannot trace, torch's counter on fake ones, as flops_source says."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from dsplan.planner.models.weightless import Inputs, fakes, lent_weights, metas, stand_in, tensors_of
from dsplan.planner.tracing.kernels import NormalValues
from dsplan.planner.tracing.operators import COUNTER_FORMULAS, FLOPS_PER_MAC, HANDLES, MetaConvolutions
from dsplan.planner.tracing.repeating import KEPT, PATTERN, Run, find_runs, left_out
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_unflatten

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


def forward_flops(
    model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], inputs: Inputs, runs: Sequence[Run] | None = None
) -> Flops:
    """FLOPs of one forward, per unit. Of the model and its inputs shapes alone are used.

    Attention counts as a full square of the sequence, causal or not. An operator that multiplies matrices and has no
    handle is named in the notes. All in bf16: the fused experts' kernel takes nothing else, and it changes no count.
    Repeated blocks are counted few, where those that are counted come to the same.
    """
    runs = find_runs(blocks) if runs is None else runs
    if runs:
        try:
            with left_out(model, blocks, runs):
                kept = [
                    index for index, (name, _) in enumerate(blocks) if not any(index in run.left_out for run in runs)
                ]
                few = _counted(model, [blocks[index] for index in kept], inputs)
            whole = _written_out(few, kept, runs, len(blocks)) if few.source == FVCORE else None
        except Exception:
            whole = None  # a loop over the number of layers, perhaps
        if whole is not None:
            return whole
    try:
        return _counted(model, blocks, inputs)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return Flops(
            (0.0,) * (len(blocks) + 1),
            UNKNOWN,
            (f"FLOPs are not known: the model cannot be traced for them ({reason})",),
        )


AGREEMENT = 0.005
"""What fvcore's and torch's counts may differ by without a word."""


def disagreement(flops: Flops | None, counted: tuple[int, int, int] | None) -> list[str]:
    """A note where torch's counter, on the traced forward, comes to other FLOPs."""
    if flops is None or flops.total is None or counted is None or flops.source != FVCORE:
        return []
    forward = counted[0]
    if abs(forward - flops.total) <= AGREEMENT * max(forward, flops.total):
        return []
    return [
        f"FLOPs of forward: {flops.total:,.0f} by fvcore, {forward:,} by torch's counter on the traced step: an operator is counted by "
        "one of them alone; the report goes by fvcore"
    ]


def _written_out(few: Flops, kept: Sequence[int], runs: Sequence[Run], num_blocks: int) -> Flops | None:
    """FLOPs of all blocks from those of few; None where the repeats that were counted differ."""
    found = dict(zip(kept, few.units[1:], strict=True))
    for run in runs:
        pattern = [found[block] for block in run.blocks_of(PATTERN)]
        if any([found[block] for block in run.blocks_of(run.true(traced))] != pattern for traced in range(1, KEPT)):
            return None
        for block in run.left_out:
            found[block] = pattern[(block - run.first) % run.period]
    return replace(few, units=(few.units[0], *(found[block] for block in range(num_blocks))))


def _counted(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], inputs: Inputs) -> Flops:
    try:
        return _by_fvcore(model, blocks, inputs)
    except Exception:
        return _by_counter(model, blocks, inputs)  # control flow by values, and what else torch.jit cannot trace


def _by_fvcore(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], inputs: Inputs) -> Flops:
    metas_only = metas(torch.bfloat16)
    with lent_weights(model, metas_only), torch.no_grad():
        on_meta = stand_in(inputs, metas_only)
        macs, unknown = _fvcore_macs(model, on_meta)
    notes = [f"FLOPs: {name} ({count} times) has no formula and counts as 0" for name, count in sorted(unknown.items())]
    return _flops(lambda name: macs.get(name, 0.0), blocks, FVCORE, notes)


def _by_counter(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], inputs: Inputs) -> Flops:
    """By torch's FlopCounterMode on fake cpu tensors."""
    from torch.utils.flop_counter import FlopCounterMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes_only = fakes(mode, torch.bfloat16)
    counter = FlopCounterMode(display=False, custom_mapping=COUNTER_FORMULAS)
    values = NormalValues()
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
        return tuple(tensors_of(output))


def _fvcore_macs(model: nn.Module, inputs: Inputs) -> tuple[dict[str, float], dict[str, int]]:
    """(multiply-adds by module name, matrix operators without a formula)."""
    from fvcore.nn import FlopCountAnalysis

    positional = _Positional(model, inputs)
    analysis = FlopCountAnalysis(positional, positional.tensors)
    analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False).tracer_warnings("none")
    analysis.set_op_handle(**HANDLES)
    logging.getLogger("fvcore.nn.jit_analysis").setLevel(logging.ERROR)
    with MetaConvolutions(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        counts = analysis.by_module_and_operator()
        unknown = analysis.unsupported_ops()
    macs = {}
    for name, found in counts.items():
        own = name.removeprefix("model").removeprefix(".") if name != "" else ""
        if name == "model" or name.startswith("model."):
            macs[own] = float(sum(number for operator, number in found.items() if operator not in _NOT_COUNTED))
    return macs, {name: count for name, count in unknown.items() if _is_matmul_like(name)}


def _is_matmul_like(operator: str) -> bool:
    name = operator.partition("::")[2] or operator
    return any(part in name for part in _MATMUL_LIKE) and not any(part in name for part in _HARMLESS)
