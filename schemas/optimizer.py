"""The optimizer as far as memory knows it: what its states take, and what its step makes and drops."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Kernel = Literal["fused", "foreach", "for-loop"]
StateDtype = Literal["fp32", "bf16", "8bit"]
STATE_DTYPES: tuple[StateDtype, ...] = ("fp32", "bf16", "8bit")

FP32 = 4
BLOCK_8BIT = 256
"""Elements that share one fp32 maximum in 8-bit states. Source: bitsandbytes/optim/optimizer.py, init_state, blocksize."""
SMALLEST_8BIT = 4096
"""Tensors of fewer elements keep fp32 states. Source: bitsandbytes/optim/optimizer.py, min_8bit_size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One row of ALGORITHMS. States are tensors like the parameter, beside a counter of 4 bytes per tensor."""

    states: int
    counter: bool = True
    foreach: int = 1
    """Whole-model temporaries of the foreach kernel."""
    loop: tuple[tuple[int, int], ...] = ((1, 2),)
    """for-loop: (of the tensor before, of this one): what is alive at once, in copies, where the step is the fullest."""
    fused: bool = False
    """Some kernel does the whole step without temporaries: torch's, apex' or DeepSpeed's."""


ALGORITHMS: dict[str, Algorithm] = {
    "adam": Algorithm(states=2, fused=True),
    "adamw": Algorithm(states=2, fused=True),
    "adagrad": Algorithm(states=1, foreach=2, loop=((1, 1),), fused=True),
    "lion": Algorithm(states=1, counter=False, foreach=1, loop=((0, 1),), fused=True),
    "sgd": Algorithm(states=0, counter=False, foreach=0, loop=(), fused=True),
    "lamb": Algorithm(states=2, counter=False, foreach=2, loop=((1, 2),), fused=True),
    "muon": Algorithm(states=1, counter=False, loop=((0, 3),)),
    "adafactor": Algorithm(states=0, loop=((1, 1),)),
    "rmsprop": Algorithm(states=1, loop=((1, 1),)),
    "adamax": Algorithm(states=2, loop=((0, 1),)),
    "nadam": Algorithm(states=2),
    "radam": Algorithm(states=2, loop=((0, 2),)),
    "adadelta": Algorithm(states=2, foreach=2, loop=((2, 1), (1, 2))),
}
"""States and counters: torch/optim/*.py of 2.13; deepspeed/ops/{lion,lamb}; lion has no kernel but the fused one there.
Temporaries: measured on torch 2.13 by `tests/schemas/test_schemas_optimizer.py`. Muon's are of its Newton-Schulz
iterations, in bf16, of a square matrix."""
OPTIMIZERS = tuple(ALGORITHMS)
OPTIMIZER_TYPES = {
    "adam": "Adam",
    "adamw": "AdamW",
    "adagrad": "Adagrad",
    "lion": "Lion",
    "sgd": "SGD",
    "lamb": "Lamb",
    "muon": "Muon",
    "adafactor": "Adafactor",
    "rmsprop": "RMSprop",
    "adamax": "Adamax",
    "nadam": "NAdam",
    "radam": "RAdam",
    "adadelta": "Adadelta",
}
"""As DeepSpeed writes them. Source: deepspeed/runtime/engine.py, _configure_basic_optimizer; torch.optim."""
DECAY_IN_GRADIENT = ("sgd", "adam")
"""Add the weight decay to a copy of the gradient. Source: torch/optim/{sgd,adam}.py."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """The optimizer as far as memory knows it."""

    name: str = "adamw"
    """Lower case, a key of ALGORITHMS."""
    momentum: bool = False
    """sgd and rmsprop: keeps one state more per parameter."""
    kernel: Kernel = "fused"
    """How the step runs: fused has no temporaries, foreach has whole-model ones, for-loop one parameter's."""
    state_dtype: StateDtype = "fp32"
    """8bit: block-wise, as bitsandbytes keeps them."""
    weight_decay: bool = False
    """Not 0, in sgd and adam, which add it to the gradient: that takes a copy. False for all others."""
    amsgrad: bool = False
    """adam and adamw: keeps one state more."""

    @property
    def states(self) -> int:
        """Tensors like the parameter. Adafactor's rows and columns are not among them."""
        more = (self.momentum and self.name in ("sgd", "rmsprop")) + (self.amsgrad and self.name in ("adam", "adamw"))
        return ALGORITHMS[self.name].states + more

    @property
    def label(self) -> str:
        """For people: "adamw", "adamw-8bit", "sgd-momentum"."""
        name = f"{self.name}-momentum" if self.momentum and self.name == "sgd" else self.name
        return name if self.state_dtype == "fp32" else f"{name}-{self.state_dtype}"


def state_bytes(spec: OptimizerSpec, shapes: Iterable[Sequence[int]]) -> int:
    """Bytes of the optimizer's states over local tensors of these shapes: shards, or flat partitions as one dim."""
    return sum(tensor_state_bytes(spec, tuple(shape)) for shape in shapes)


def tensor_state_bytes(spec: OptimizerSpec, shape: Sequence[int]) -> int:
    """Bytes of the states of one local tensor, its counter included.

    Adafactor keeps one number per row and per column of the last two dims, and a whole state of vectors. Muon steps over
    matrices; its AdamW, with two states, over the rest. Source: torch/optim/{_adafactor,_muon}.py.
    """
    numel = product(shape)
    counter = FP32 if ALGORITHMS[spec.name].counter and numel else 0
    states = spec.states
    if spec.name == "adafactor":
        rows_and_columns = numel // shape[-1] + numel // shape[-2] if len(shape) > 1 and numel else numel
        return _width(spec) * rows_and_columns + counter
    if spec.name == "muon" and len(shape) != 2:
        states, counter = 2, FP32 if numel else 0
    if spec.state_dtype == "8bit":
        if numel < SMALLEST_8BIT:
            return FP32 * states * numel + counter
        return states * (numel + FP32 * -(-numel // BLOCK_8BIT)) + counter
    return _width(spec) * states * numel + counter


def state_formula(spec: OptimizerSpec, counted: str, width: int | None = None) -> str:
    """What `state_bytes` adds up, for people; counters and 8-bit states' small tensors are left out. width: of a state, if not its own."""
    label, states = spec.label, spec.states
    if spec.name == "adafactor":
        return f"{label}: {_width(spec)} B for each row and column of {counted}"
    if spec.state_dtype == "8bit":
        return f"{label}: {states} x (1 B + {FP32} B / {BLOCK_8BIT}) x {counted}"
    return f"{label}: {states} x {width or _width(spec)} B x {counted}"


def step_temporary_elements(spec: OptimizerSpec, numels: Sequence[int]) -> int:
    """Elements, in fp32, that the step over tensors of these sizes, in this order, makes and drops."""
    row = ALGORITHMS[spec.name]
    kernel = kernel_of(spec)
    if kernel == "fused":
        return 0
    added = spec.weight_decay
    if kernel == "foreach":
        return max(row.foreach, int(added)) * sum(numels)
    loop = tuple((before, this + added) for before, this in row.loop) or ((0, int(added)),)
    alone = max(this for _, this in loop)
    most = alone * max(numels, default=0)
    for before, this in loop:
        most = max(most, *(before * a + this * b for a, b in itertools.pairwise(numels)), 0)
    return most


def kernel_of(spec: OptimizerSpec) -> Kernel:
    """The kernel that runs: what has none that is fused runs tensor by tensor."""
    return "for-loop" if spec.kernel == "fused" and not ALGORITHMS[spec.name].fused else spec.kernel


FUSED_ON_SHARDS = ("adam", "adamw")
"""What torch's fused kernels step over shards (DTensors). Source: torch/distributed/tensor/_ops/_pointwise_ops.py of 2.13."""


def on_shards(spec: OptimizerSpec) -> OptimizerSpec:
    """The optimizer as the native engine runs it: tensor by tensor where no fused kernel takes shards."""
    if spec.kernel == "fused" and spec.name not in FUSED_ON_SHARDS:
        return replace(spec, kernel="for-loop")
    return spec


def product(shape: Sequence[int]) -> int:
    result = 1
    for length in shape:
        result *= length
    return result


_NO_MATTER = ("", "32bit", "bf16", "fp32", "bnb", "paged", "torch", "fused", "apex", "hf")
"""Words in names that change no bytes, or were read before."""


def _width(spec: OptimizerSpec) -> int:
    return 2 if spec.state_dtype == "bf16" else FP32


def optimizer_named(name: str) -> OptimizerSpec | None:
    """The optimizer of that name, as torch, DeepSpeed, bitsandbytes, apex or HF's `optim` spell it; None: not known.

    "AdamW", "sgd-momentum", "FusedAdam", "DeepSpeedCPUAdam", "AdamW8bit", "paged_adamw_8bit", "adamw_torch_fused", "adamw-bf16".
    """
    lowered = name.lower().replace("-", "_")
    dtype: StateDtype = "fp32"
    if "8bit" in lowered:
        dtype = "8bit"
    elif lowered.endswith("_bf16"):
        dtype = "bf16"
    words = [word for word in lowered.replace("8bit", "").split("_") if word not in _NO_MATTER]
    momentum = "momentum" in words
    words = [word for word in words if word != "momentum"]
    if len(words) != 1:
        return None
    word = words[0]
    for prefix in ("deepspeed", "fused", "cpu", "mu", "paged"):
        if word not in ALGORITHMS and word.removeprefix(prefix) != word:
            word = word.removeprefix(prefix)
    if word not in ALGORITHMS:
        return None
    if momentum and word not in ("sgd", "rmsprop"):
        return None
    return OptimizerSpec(name=word, momentum=momentum, state_dtype=dtype)
