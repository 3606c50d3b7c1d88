"""Hand-made traces: a stack of equal blocks between an embedding and a head, in round numbers."""

from __future__ import annotations

from dataclasses import replace

from dsplan.schemas.trace import Param, Point, Segment, Trace, Unit
from dsplan.schemas.units import PRECISION_BYTES
from hypothesis import strategies as st


def param(name: str, *shape: int, width: int, tp_dim: int | None = None) -> Param:
    return Param(name=name, shape=shape, dtype_bytes=width, trainable=True, tp_dim=tp_dim)


def stack(*, blocks: int, hidden: int, vocab: int, tokens: int, precision: str) -> Trace:
    """Blocks of an up and a down linear and a norm; each keeps 6 x hidden per token, 4 of which tp splits."""
    width = PRECISION_BYTES[precision]
    root = Unit(
        name="",
        params=(
            param("tokens", vocab, hidden, width=width, tp_dim=0),
            param("norm", hidden, width=width),
            param("head", vocab, hidden, width=width, tp_dim=0),
        ),
        forward_flops=2.0 * tokens * hidden * vocab,
    )
    stacked = tuple(
        Unit(
            name=f"blocks.{index}",
            params=(
                param(f"blocks.{index}.norm", hidden, width=width),
                param(f"blocks.{index}.up", 4 * hidden, hidden, width=width, tp_dim=0),
                param(f"blocks.{index}.down", hidden, 4 * hidden, width=width, tp_dim=1),
            ),
            forward_flops=16.0 * tokens * hidden * hidden,
        )
        for index in range(blocks)
    )
    line = tokens * hidden * width
    block_grads = (hidden + 8 * hidden * hidden) * width
    head_grads = (hidden + vocab * hidden) * width
    logits = 4 * tokens * vocab
    saved = [Point((1 + 6 * index) * line, 4 * index * line, 0) for index in range(blocks + 1)]
    opening = Point(saved[-1].activation_bytes + 2 * logits, saved[-1].split_bytes, 0)
    after_head = replace_grad(saved[-1], head_grads)
    segments = [_segment(0, "forward", Point(0, 0, 0), saved[0])]
    for index in range(blocks):
        segments.append(_segment(index + 1, "forward", saved[index], saved[index + 1]))
    segments.append(_segment(0, "forward", saved[-1], Point(opening.activation_bytes - logits, opening.split_bytes, 0)))
    segments.append(
        Segment(unit=0, phase="backward", start=segments[-1].end, end=after_head, points=(opening, after_head))
    )
    for index in reversed(range(blocks)):
        end = replace_grad(saved[index], block_grads)
        begin = replace_grad(saved[index + 1], 0)
        worst = Point(begin.activation_bytes + 2 * line, begin.split_bytes, block_grads // 2)
        segments.append(Segment(unit=index + 1, phase="backward", start=begin, end=end, points=(worst, end)))
    whole = Point(0, 0, head_grads + vocab * hidden * width)
    segments.append(
        Segment(unit=0, phase="backward", start=replace_grad(saved[0], head_grads), end=whole, points=(whole,))
    )
    units = (root, *stacked)
    return Trace(
        source="hand-made",
        units=units,
        buffer_bytes=0,
        precision=precision,
        recompute="none",
        micro_batch=1,
        seq_len=tokens,
        segments=tuple(segments),
        forward_flops=sum(unit.forward_flops for unit in units),
        flops_source="hand-made",
        tp_limit=8,
    )


def replace_grad(point: Point, grad_bytes: int) -> Point:
    return replace(point, grad_bytes=grad_bytes)


def _segment(unit: int, phase, start: Point, end: Point) -> Segment:
    return Segment(unit=unit, phase=phase, start=start, end=end, points=(end,))


stacks = st.builds(
    stack,
    blocks=st.integers(1, 6),
    hidden=st.sampled_from([8, 24, 64]),
    vocab=st.sampled_from([16, 100, 1000]),
    tokens=st.sampled_from([1, 16, 256]),
    precision=st.sampled_from(["fp32", "bf16", "fp16"]),
)
