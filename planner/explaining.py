"""Why a row's verdict is what it is: the moment that decides, what fills it, what is left, what would make it fit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from dsplan.planner.asking import FITTING, fewest_gpus, largest, needs_length, probe, reach_of, trying
from dsplan.planner.candidates import no_such_offload
from dsplan.planner.memory import ledger
from dsplan.planner.memory.device import host_phases
from dsplan.planner.rows import Bench
from dsplan.schemas.answers import Change, Explanation, LargeItem, Reach
from dsplan.schemas.estimate import Row
from dsplan.schemas.ledger import PHASES
from dsplan.schemas.plan import Plan
from dsplan.schemas.problem import Problem

LARGEST_ITEMS = 4
MOST_CHANGES = 3
MOST_PROBES = 4
"""Of a value, for the block that every report has: the present one and three more, so that a report costs few traces."""
LENGTH_PROBES = 9
"""Of shorter sequences: the first is the present one, and each is a trace."""
SMALL_BUCKET = 50_000_000
"""Elements. Source: the size that DeepSpeed's documentation gives for clusters short of memory (docs, zero_optimization)."""


def explanation(bench: Bench, row: Row, *, own: bool, global_batch: int | None) -> Explanation | None:
    """Of a row with activations; None for one that knows state bytes alone."""
    book, cluster = row.ledger, bench.cluster
    if book is None or row.memory.device_bytes is None:
        return None
    usable = cluster.gpu.usable_bytes if cluster.gpu else None
    phases = tuple(
        (phase, held)
        for phase in dict.fromkeys((*PHASES, *(moment.phase for moment in book.moments)))
        if (held := book.phase_bytes(phase))
    )
    hosts = host_phases(book, row.plan, cluster)
    items = sorted(book.peak.items, key=lambda item: -item.bytes)[:LARGEST_ITEMS]
    reach: tuple[Reach, ...] = ()
    changes: tuple[Change, ...] = ()
    no_change = None
    if usable is not None and row.verdict in FITTING:
        reach = tuple(_reaches(bench, row.plan))
    elif usable is not None:
        changes = tuple(itertools.islice(_changes(bench, row, global_batch), MOST_CHANGES))
        if len(changes) < MOST_CHANGES:
            no_change = (
                "no other change of those tried makes it fit" if changes else "no change of those tried makes it fit"
            )
    return Explanation(
        plan=row.plan,
        own=own,
        verdict=row.verdict,
        phase=book.peak.phase,
        where=book.peak.where,
        phases=phases,
        largest=tuple(
            LargeItem(category=item.category, bytes=item.bytes, why=item.why) for item in items if item.bytes
        ),
        usable_bytes=usable,
        room_bytes=None if usable is None else usable - row.memory.device_bytes,
        host_phases=hosts,
        host_room_bytes=_room(cluster.host_memory_bytes, max(held for _, held in hosts)),
        reach=reach,
        changes=changes,
        no_change=no_change,
    )


def _room(there: int | None, taken: int) -> int | None:
    return None if there is None else there - taken


def _reaches(bench: Bench, plan: Plan) -> Iterator[Reach]:
    """How far micro_batch and sequence length go, where the model has them to vary."""
    values: tuple[Literal["micro-batch", "seq-len"], ...] = ("micro-batch", "seq-len")
    for value in values if bench.subject.kind != "script" else ():  # each probe of a script is a run of it
        try:
            yield reach_of(bench, plan, value, MOST_PROBES)
        except Problem:  # a script's or an image model's length: there is nothing to vary
            continue


@dataclass(frozen=True, slots=True)
class _Move:
    """A change of a plan. `plan` is None where it does not apply."""

    kind: str
    what: str
    costs: str
    plan: Plan | None


def _changes(bench: Bench, row: Row, global_batch: int | None) -> Iterator[Change]:
    """What makes it fit, the least intrusive first: single changes, then several together. Each is evaluated."""
    plan = row.plan
    if row.verdict == "host_oom":
        yield from _less_on_the_host(bench, row)
        return
    yield from _expandable(bench, row)
    enough: list[frozenset[str]] = []
    """Kinds of moves that suffice: more beside them is no small change."""
    for move in _moves(bench, row):
        change = _evaluated(bench, row, [move])
        if change is not None:
            enough.append(frozenset([move.kind]))
            yield change
    yield from _more_gpus(bench, row, global_batch)
    for make in (_eight_bit, _shorter):
        change = make(bench, row)
        if change is not None:
            yield change
    strongest = [make(plan) for make in _STRONGEST]
    for number in range(2, len(strongest) + 1):
        for moves in itertools.combinations([move for move in strongest if move.plan is not None], number):
            kinds = frozenset(move.kind for move in moves)
            if len(kinds) < number or any(fewer <= kinds for fewer in enough):
                continue
            change = _evaluated(bench, row, list(moves))
            if change is not None:
                enough.append(kinds)
                yield change


def _expandable(bench: Bench, row: Row) -> Iterator[Change]:
    """Another setting of the allocator, where what is allocated would have room: the training stays as it is."""
    memory, cluster = row.memory, bench.cluster
    assert memory.device_bytes_low is not None and cluster.gpu is not None
    if cluster.expandable_segments or memory.device_bytes_low > cluster.gpu.usable_bytes:
        return
    found = bench.row(row.plan, replace(cluster, expandable_segments=True))
    if found.verdict in FITTING:
        yield _change("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", "an environment variable", found)


def _less_on_the_host(bench: Bench, row: Row) -> Iterator[Change]:
    """Where a node's memory is what is missing. Fewer ranks on a node would help too, but no one asks for that."""
    plan = row.plan
    knobs = replace(plan.knobs, gather_16bit_weights_on_save=False)
    moves = [
        _Move("build", "the model made on meta (zero.Init)", "another script", replace(plan, built="meta")),
        _Move(
            "save", "stage3_gather_16bit_weights_on_model_save false", "weights in shards", replace(plan, knobs=knobs)
        ),
    ]
    if plan.offload == "param":
        moves.append(_Move("offload", "offload optimizer alone", "parameters stay", replace(plan, offload="optimizer")))
    if plan.offload != "none":
        moves.append(_Move("offload", "offload none", "states stay on the GPUs", replace(plan, offload="none")))
    for move in moves:
        if move.plan != plan and (change := _evaluated(bench, row, [move])) is not None:
            yield change


def _change(what: str, costs: str, found: Row) -> Change:
    memory = found.memory
    assert memory.device_bytes is not None and memory.device_bytes_high is not None
    return Change(
        what=what,
        costs=costs,
        device_bytes=memory.device_bytes,
        device_bytes_high=memory.device_bytes_high,
        verdict=found.verdict,
    )


def _evaluated(bench: Bench, row: Row, moves: list[_Move]) -> Change | None:
    """The moves one after the other, as one change; None where it does not fit, or cannot be carried out."""
    plan = row.plan
    for move in moves:
        if move.plan is None:
            return None
        plan = _merged(row.plan, plan, move.plan)
    if _no_such(plan) or _states_alone_exceed(bench, row, plan):
        return None
    try:
        found = bench.row(plan)
    except Problem:
        return None
    if found.verdict not in FITTING or (row.runnable and not found.runnable):
        return None
    return _change(
        ", ".join(move.what for move in moves), "; ".join(dict.fromkeys(move.costs for move in moves)), found
    )


def _states_alone_exceed(bench: Bench, row: Row, plan: Plan) -> bool:
    """Whether parameters, gradients and optimizer state take more than a GPU has at every moment of a step.

    They do not depend on what is computed, so that no other length, micro_batch or recompute need be traced.
    """
    if bench.cluster.gpu is None or plan.precision != row.plan.precision or plan.seq_len != row.plan.seq_len:
        return False
    book = ledger(bench.traced(row.plan), plan)
    held = [
        sum(moment.category_bytes(category) for category in ("params", "grads", "optimizer"))
        for moment in book.moments
        if moment.phase in ("forward", "backward", "step")
    ]
    return bool(held) and min(held) > bench.cluster.gpu.usable_bytes


_FIELDS = (
    "zero_stage",
    "precision",
    "micro_batch",
    "accumulation",
    "recompute",
    "offload",
    "optimizer",
    "knobs",
    "built",
)


def _merged(first: Plan, plan: Plan, changed: Plan) -> Plan:
    """`plan` with what `changed` has otherwise than `first`."""
    return replace(
        plan,
        **{name: value for name in _FIELDS if (value := getattr(changed, name)) != getattr(first, name)},
    )


def _no_such(plan: Plan) -> bool:
    return no_such_offload(plan.engine, plan.offload, plan.zero_stage) is not None or (
        plan.layout.pp > 1 and plan.zero_stage > 1
    )


def _moves(bench: Bench, row: Row) -> Iterator[_Move]:
    """Single changes, the least intrusive first."""
    plan = row.plan
    yield _buckets(plan)
    yield from _smaller_batch(bench, row)
    yield from _higher_zero(plan)
    yield _selective(plan)
    yield _recompute(plan)
    yield _offload_optimizer(plan)
    yield _offload_param(plan)
    if plan.precision == "fp32":
        yield _Move(
            "precision", "precision bf16", "numbers of 16 bits in forward and backward", replace(plan, precision="bf16")
        )


def _buckets(plan: Plan) -> _Move:
    knobs = plan.knobs
    smaller = replace(
        knobs,
        reduce_bucket_size=min(knobs.reduce_bucket_size, SMALL_BUCKET),
        allgather_bucket_size=min(knobs.allgather_bucket_size, SMALL_BUCKET),
    )
    applies = plan.engine == "deepspeed" and plan.zero_stage > 0 and smaller != knobs
    what = f"reduce_bucket_size and allgather_bucket_size {SMALL_BUCKET}"
    return _Move("buckets", what, "more, smaller messages", replace(plan, knobs=smaller) if applies else None)


def _smaller_batch(bench: Bench, row: Row) -> Iterator[_Move]:
    """The largest micro_batch that fits and divides the present one: the same samples in more passes."""
    plan = row.plan
    if _states_alone_exceed(bench, row, plan):
        return
    fitting = [n for n in range(plan.micro_batch - 1, 0, -1) if plan.micro_batch % n == 0]
    if fitting and probe(bench, _with_batch(plan, 1), 1).fits:
        best = next(n for n in fitting if n == 1 or probe(bench, _with_batch(plan, n), n).fits)
        yield _batch_move(plan, best)


def _with_batch(plan: Plan, micro_batch: int) -> Plan:
    return replace(plan, micro_batch=micro_batch, accumulation=plan.accumulation * plan.micro_batch // micro_batch)


def _batch_move(plan: Plan, micro_batch: int) -> _Move:
    changed = _with_batch(plan, micro_batch)
    what = f"micro_batch {micro_batch} with accumulation {changed.accumulation}"
    return _Move(
        "batch", what, "smaller kernels; the same global batch", changed if micro_batch < plan.micro_batch else None
    )


def _one_sample(plan: Plan) -> _Move:
    return _batch_move(plan, 1)


def _higher_zero(plan: Plan) -> Iterator[_Move]:
    for stage in range(plan.zero_stage + 1, 4):
        yield _zero(plan, stage)


def _zero(plan: Plan, stage: int) -> _Move:
    applies = plan.layout.dp > 1 and stage > plan.zero_stage and (plan.layout.pp == 1 or stage < 2)
    costs = "half as much communication again" if stage == 3 else "no more communication at accumulation 1"
    return _Move("zero", f"zero {stage}", costs, replace(plan, zero_stage=stage) if applies else None)


def _zero3(plan: Plan) -> _Move:
    return _zero(plan, 3)


def _selective(plan: Plan) -> _Move:
    changed = replace(plan, recompute="selective") if plan.recompute == "none" else None
    return _Move("recompute", "recompute selective", "norms, activation functions and unfused attention twice", changed)


def _recompute(plan: Plan) -> _Move:
    changed = replace(plan, recompute="full") if plan.recompute != "full" else None
    return _Move("recompute", "recompute full", "each block's forward twice, about a third more time", changed)


def _offload_optimizer(plan: Plan) -> _Move:
    changed = replace(plan, offload="optimizer") if plan.offload == "none" else None
    return _Move("offload", "offload optimizer", "optimizer steps on the host", changed)


def _offload_none(plan: Plan) -> _Move:
    """For a host that is too small, beside what makes room on the GPU."""
    changed = replace(plan, offload="none") if plan.offload != "none" else None
    return _Move("offload", "offload none", "states stay on the GPUs", changed)


def _offload_param(plan: Plan) -> _Move:
    changed = replace(plan, offload="param") if plan.offload != "param" else None
    return _Move("offload", "offload param", "parameters come over the bus for each use", changed)


_STRONGEST: tuple[Callable[[Plan], _Move], ...] = (
    _buckets,
    _one_sample,
    _zero3,
    _recompute,
    _offload_optimizer,
    _offload_param,
    _offload_none,
)
"""What is combined where too few single changes suffice, each at its full strength."""


def _more_gpus(bench: Bench, row: Row, global_batch: int | None) -> Iterator[Change]:
    found = fewest_gpus(bench, row.plan, global_batch)
    if found.answer is None or found.answer.value <= bench.cluster.ranks:
        return
    answer = found.answer
    assert answer.device_bytes is not None and answer.device_bytes_high is not None
    notes = "; ".join(found.notes)
    yield Change(
        what=f"{answer.value} GPUs instead of {bench.cluster.ranks}",
        costs=notes or "more GPUs",
        device_bytes=answer.device_bytes,
        device_bytes_high=answer.device_bytes_high,
        verdict=answer.verdict,
    )


def _eight_bit(bench: Bench, row: Row) -> Change | None:
    """Another optimizer's states: other numbers, so it comes late."""
    optimizer = row.plan.optimizer
    if optimizer.state_dtype == "8bit" or optimizer.name not in ("adam", "adamw", "lion", "sgd", "adagrad"):
        return None
    changed = replace(row.plan, optimizer=replace(optimizer, state_dtype="8bit"))
    return _evaluated(bench, row, [_Move("optimizer", "8-bit optimizer states", "states of 8 bits", changed)])


def _shorter(bench: Bench, row: Row) -> Change | None:
    """The longest sequence that fits: other data, so it comes last."""
    plan = row.plan
    if plan.seq_len is None or plan.seq_len < 2:
        return None
    try:
        needs_length(bench, plan, "")
    except Problem:
        return None
    if _states_alone_exceed(bench, row, plan):
        return None
    answer, _ = largest(trying(bench, plan, "seq-len"), plan.seq_len, plan.seq_len, most_probes=LENGTH_PROBES)
    if answer is None:
        return None
    assert answer.device_bytes is not None and answer.device_bytes_high is not None
    return Change(
        what=f"sequences of at most {answer.value}",
        costs="shorter samples",
        device_bytes=answer.device_bytes,
        device_bytes_high=answer.device_bytes_high,
        verdict=answer.verdict,
    )
