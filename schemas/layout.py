"""Where everything lives: the degrees of parallelism, and per ZeRO stage the placement of param, grad and optim."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator

ZeroStage = Literal[0, 1, 2, 3]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Degrees of parallelism; their product is the number of ranks.

    dp_replicate x dp_shard = dp: states are sharded over dp_shard and replicated over dp_replicate (hybrid sharding).
    tp splits tensors, pp splits the list of blocks, sp splits the sequence.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    pp: int = 1
    sp: int = 1

    def __post_init__(self) -> None:
        for name in ("dp_replicate", "dp_shard", "tp", "pp", "sp"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} is {value!r}, but must be a whole number of at least 1")

    @property
    def dp(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.pp * self.sp

    def __str__(self) -> str:
        degrees = [f"dp {self.dp}"]
        if self.dp_replicate > 1:
            degrees[0] += f" ({self.dp_replicate} x {self.dp_shard})"
        degrees += [
            f"{name} {value}" for name, value in (("tp", self.tp), ("pp", self.pp), ("sp", self.sp)) if value > 1
        ]
        return " x ".join(degrees)


class Placement(Enum):
    """How one tensor lies over the dp ranks: a whole copy each, one piece each, or a sum not yet taken."""

    REPLICATE = "replicate"
    SHARD = "shard"
    PARTIAL = "partial"


class Move(Enum):
    """A collective, named by what it does to placement."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Placement between events (between micro-batches for grad)."""

    param: Placement
    grad: Placement
    optim: Placement


REPLICATE, SHARD, PARTIAL = Placement.REPLICATE, Placement.SHARD, Placement.PARTIAL

ZERO: dict[int, StateLayout] = {
    0: StateLayout(REPLICATE, PARTIAL, REPLICATE),
    1: StateLayout(REPLICATE, PARTIAL, SHARD),
    2: StateLayout(REPLICATE, SHARD, SHARD),
    3: StateLayout(SHARD, SHARD, SHARD),
}
"""Source: Rajbhandari et al. 2020 (arXiv:1910.02054), section 5."""

TRANSITIONS: dict[tuple[Placement, Placement], Move] = {
    (SHARD, REPLICATE): Move.ALL_GATHER,
    (PARTIAL, SHARD): Move.REDUCE_SCATTER,
    (PARTIAL, REPLICATE): Move.ALL_REDUCE,
}


@dataclass(frozen=True, slots=True)
class Transfer:
    """One collective over the whole model: what moves, how, and in which event of the step."""

    tensor: Literal["param", "grad"]
    move: Move
    event: Literal["forward", "backward", "step"]
    micro_batch: int


def transfers(zero_stage: int, accumulation: int) -> Iterator[Transfer]:
    """Every dp collective of one optimizer step, in order, each over all parameters once.

    Volume in parameters: an all-gather or a reduce-scatter is 1, an all-reduce 2. At accumulation 1 the sums are
    2, 2, 2, 3 for stages 0 to 3.
    Source: Rajbhandari et al. 2020 (arXiv:1910.02054), section 7.
    """
    state = ZERO[zero_stage]
    for micro_batch in range(accumulation):
        if state.param is SHARD:  # gathered for use and dropped again, once in each direction
            yield Transfer("param", TRANSITIONS[SHARD, REPLICATE], "forward", micro_batch)
            yield Transfer("param", TRANSITIONS[SHARD, REPLICATE], "backward", micro_batch)
        if state.grad is SHARD:
            yield Transfer("grad", TRANSITIONS[PARTIAL, SHARD], "backward", micro_batch)
    if state.grad is PARTIAL:  # summed once, at the accumulation boundary, to where the optimizer state is
        yield Transfer("grad", TRANSITIONS[PARTIAL, state.optim], "step", accumulation - 1)
    if state.param is REPLICATE and state.optim is SHARD:
        yield Transfer("param", TRANSITIONS[SHARD, REPLICATE], "step", accumulation - 1)


VOLUME = {Move.ALL_GATHER: 1, Move.REDUCE_SCATTER: 1, Move.ALL_REDUCE: 2}
"""Wire volume of each move in units of the tensor's size, times (n-1)/n. Source: as `transfers`."""
