"""The moves of one optimizer step folded into bytes and seconds: what the placement table costs on given links."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dsplan.planner.memory.native_widths import widths
from dsplan.schemas.cluster import Cluster
from dsplan.schemas.layout import VOLUME, Layout, Move, transfers
from dsplan.schemas.plan import Plan
from dsplan.schemas.trace import Trace, Unit
from dsplan.schemas.units import PRECISION_BYTES

TP_ALL_REDUCES = {"forward": 2, "backward": 2}
"""Per block and micro-batch, of one [micro_batch, seq, hidden] tensor: after attention and after the MLP, and the
conjugates in backward. Source: Shoeybi et al. 2019 (arXiv:1909.08053), section 3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One collective of a rank: over which axis, in which event, of which micro-batch."""

    axis: str
    move: Move
    event: str
    micro_batch: int
    payload_bytes: int
    """The full tensor."""
    ranks: int

    @property
    def wire_bytes(self) -> int:
        """What one rank sends over its link in a ring: (n-1)/n x payload for a gather or a scatter, twice for both."""
        return VOLUME[self.move] * self.payload_bytes * (self.ranks - 1) // self.ranks


@dataclass(frozen=True, slots=True)
class Sums:
    """What every plan on a trace asks again."""

    params: int
    trainable_params: int
    hidden_size: int
    blocks_flops: float


def sums(trace: Trace) -> Sums:
    """Remembered per trace."""
    found = _remembered.get(id(trace))
    if found is None or found[0] is not trace:
        if len(_remembered) > 256:
            _remembered.clear()
        blocks = trace.blocks
        made = Sums(
            trace.params, trace.trainable_params, hidden_size(blocks), sum(unit.forward_flops for unit in blocks)
        )
        found = _remembered[id(trace)] = (trace, made)
    return found[1]


_remembered: dict[int, tuple[Trace, Sums]] = {}


def _sent_width(plan: Plan) -> int:
    """Bytes of an element of a gradient on its way."""
    if plan.engine == "native":
        return widths(plan).reduce
    return PRECISION_BYTES[plan.knobs.communication_dtype or plan.precision]


def traffic(trace: Trace, plan: Plan) -> Iterator[Sent]:
    """Every dp and tp collective of one optimizer step of one rank, each over the rank's part of the model at once.

    The all-reduce of the tp axis is listed once per event and micro-batch, with all blocks' payloads added up.
    """
    layout = plan.layout
    share = 1 / (layout.tp * layout.pp)
    width = PRECISION_BYTES[plan.precision]
    held = sums(trace)
    sizes = {
        "param": round(held.params * width * share),
        "grad": round(held.trainable_params * _sent_width(plan) * share),
    }
    if layout.dp > 1:
        for transfer in transfers(plan.zero_stage, plan.accumulation):
            yield Sent(
                axis="dp",
                move=transfer.move,
                event=transfer.event,
                micro_batch=transfer.micro_batch,
                payload_bytes=sizes[transfer.tensor],
                ranks=layout.dp,
            )
    if layout.tp > 1 and trace.micro_batch:
        blocks = -(-len(trace.blocks) // layout.pp)
        tensor = trace.micro_batch * (trace.seq_len or 1) * held.hidden_size * width
        for micro_batch in range(plan.accumulation):
            for event, times in TP_ALL_REDUCES.items():
                yield Sent(
                    axis="tp",
                    move=Move.ALL_REDUCE,
                    event=event,
                    micro_batch=micro_batch,
                    payload_bytes=blocks * times * tensor,
                    ranks=layout.tp,
                )


def seconds(sent: Sent, layout: Layout, cluster: Cluster) -> float:
    """Bandwidth time of one collective: wire bytes over the slowest link that its ring crosses.

    Ranks are laid out tp first, then dp, then pp, so that a tp group lies within a node, and a dp group where
    tp x dp GPUs do.
    """
    assert cluster.gpu is not None
    reach = layout.tp if sent.axis == "tp" else layout.tp * layout.dp
    inside = reach <= cluster.gpus_per_node
    rate = cluster.gpu.link_bytes_per_second if inside else cluster.gpu.inter_node_bytes_per_second
    return sent.wire_bytes / rate


def hidden_size(blocks: tuple[Unit, ...]) -> int:
    """The width of the residual stream: the longest vector parameter of a block that tp does not split (its norms')."""
    vectors = [
        param.shape[0] for unit in blocks for param in unit.params if len(param.shape) == 1 and param.tp_dim is None
    ]
    return max(vectors, default=0)
