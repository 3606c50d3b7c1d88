"""Which tensors tensor parallelism divides: column and row linears, the vocabulary, and the largest degree that fits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from dsplan.planner.tracing.timeline import COLUMN, ROW
from torch import nn

HEADS = (
    "num_key_value_heads",
    "num_kv_heads",
    "n_kv_heads",
    "n_head_kv",
    "num_attention_heads",
    "num_heads",
    "n_heads",
    "n_head",
    "nhead",
    "heads",
)
"""Where models keep their number of heads; the ones of keys and values first, since they are the fewer."""

_GROUPS = (
    "attention and MLP each a child of the block, or between two norms, with two or more nn.Linear of which the last leads back "
    "to the width of the first; no nn.MultiheadAttention, convolution or experts in one tensor"
)


@dataclass(slots=True)
class Splitting:
    """roles: COLUMN or ROW by linear. dims: the dim that tp divides by id of parameter. limit: tp must divide it."""

    roles: dict[nn.Module, int] = field(default_factory=dict)
    dims: dict[int, int] = field(default_factory=dict)
    limit: int = 1
    notes: list[str] = field(default_factory=list)
    no_rule: str = ""
    """What was looked for and not found, where the model is not split."""


def splitting(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]) -> Splitting:
    """The rule of Megatron by structure: in a group of linears the last is split by rows, those before by columns.

    A group is what a child of the block (attention, mlp) holds, or, where the block holds its linears one by one, the
    linears between two norms. Where a group or the number of heads is not recognised the model is not split.
    Source: Shoeybi et al. 2019 (arXiv:1909.08053), section 3.
    """
    made = Splitting()
    lengths: list[int] = []
    for name, block in blocks:
        groups = list(_groups(block))
        heads = _heads(block) or _heads(getattr(model, "config", None))
        if heads is None:
            return Splitting(
                no_rule=f"no module in block {name} and no config has its number of heads, looked for as {', '.join(HEADS)}"
            )
        if not groups or not _recognised(block, groups):
            return Splitting(no_rule=f"the linears of block {name} are not in the groups that are split ({_GROUPS})")
        lengths.append(heads)
        for group in groups:
            for linear in group:
                row = linear is group[-1]
                made.roles[linear] = ROW if row else COLUMN
                lengths.append(_place(made, linear, row))
    if not blocks:
        return Splitting(no_rule="it has no blocks that repeat")
    made.limit = math.gcd(*lengths)
    _split_vocabulary(model, made)
    return made


def _recognised(block: nn.Module, groups: Sequence[Sequence[nn.Module]]) -> bool:
    """Whether the groups are all the matrices of the block, and each leads back to the width that it starts from."""
    grouped = {id(linear) for group in groups for linear in group}
    for module in block.modules():
        if isinstance(module, nn.MultiheadAttention) or (_is_linear(module) and id(module) not in grouped):
            return False
        if any(param.dim() > 2 for param in module.parameters(recurse=False)):  # experts in one tensor, convolutions
            return False
    return all(len(group) >= 2 and _lengths(group[-1])[1] == _lengths(group[0])[0] for group in groups)


def _lengths(linear: nn.Module) -> tuple[int, int]:
    """(in, out) of a linear."""
    rows, columns = linear.weight.shape  # type: ignore[misc]
    return (columns, rows) if isinstance(linear, nn.Linear) else (rows, columns)


def _place(made: Splitting, linear: nn.Module, row: bool) -> int:
    """Write down the linear's dims; the length that is divided."""
    weight = linear.weight
    assert isinstance(weight, nn.Parameter)
    transposed = not isinstance(linear, nn.Linear)  # transformers' Conv1D holds [in, out]
    dim = int(row) ^ int(transposed)
    made.dims[id(weight)] = dim
    bias = getattr(linear, "bias", None)
    if bias is not None and not row:
        made.dims[id(bias)] = 0
    return int(weight.shape[dim])


def _split_vocabulary(model: nn.Module, made: Splitting) -> None:
    in_blocks = made.roles
    embeddings = [child for child in model.modules() if isinstance(child, nn.Embedding)]
    if not embeddings:
        return
    tokens = max(embeddings, key=lambda child: child.num_embeddings)
    vocab = tokens.num_embeddings
    heads = [
        child
        for child in model.modules()
        if isinstance(child, nn.Linear) and child not in in_blocks and child.out_features == vocab
    ]
    shared = math.gcd(made.limit, vocab)
    if made.limit // shared % 2 == 0:
        made.notes.append(
            f"tensor parallel: the vocabulary of {vocab} is not divisible by {made.limit}, so embedding and head stay whole"
        )
        return
    made.limit = shared  # as many powers of two as before
    made.dims[id(tokens.weight)] = 0
    for head in heads:
        made.roles[head] = COLUMN
        _place(made, head, row=False)


def _groups(block: nn.Module) -> Iterator[list[nn.Module]]:
    """Linears by group, in the order in which the block holds them."""
    loose: list[nn.Module] = []
    for child in block.children():
        held = [module for module in child.modules() if _is_linear(module)]
        if _is_norm(child) and loose:
            yield loose
            loose = []
        elif len(held) == 1:
            loose.append(held[0])
        elif len(held) > 1 and sum(_holds_group(grandchild) for grandchild in child.children()) > 1:
            yield from _groups(child)  # a list of layers, or of experts
        elif held:
            yield held
    if loose:
        yield loose


def _holds_group(module: nn.Module) -> bool:
    return sum(_is_linear(child) for child in module.modules()) > 1


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def _heads(holder: object) -> int | None:
    holders = holder.modules() if isinstance(holder, nn.Module) else [holder]
    for held in holders:
        for source in (held, getattr(held, "config", None)):
            for name in HEADS:
                value = getattr(source, name, None)
                if isinstance(value, int) and value > 0:
                    return value
    return None
