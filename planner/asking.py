"""`--max` and `--min`: how far a value of a plan goes before something does not hold it. Every probe is a trace of its own."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from dsplan.planner.candidates import regrouped
from dsplan.planner.memory.device import host_phases
from dsplan.planner.rows import Bench
from dsplan.planner.tables import position_table
from dsplan.schemas.answers import Probe, Reach
from dsplan.schemas.cluster import Cluster
from dsplan.schemas.estimate import Row
from dsplan.schemas.plan import Plan
from dsplan.schemas.problem import Problem
from dsplan.schemas.units import gib

LARGEST_MICRO_BATCH = 1 << 20
LONGEST_SEQ_LEN = 1 << 24
MOST_GPUS = 1 << 14
"""Where the searches stop when memory does not stop them."""
FITTING = ("fits", "tight")

Try = Callable[[int], Probe]


def reach_of(
    bench: Bench, plan: Plan, value: Literal["micro-batch", "seq-len"], most_probes: int | None = None
) -> Reach:
    """The largest micro_batch or the longest sequence with which this plan fits. Problem where that cannot be asked.

    most_probes: after so many the search stops, and what is known to fit by then stands as the answer.
    """
    usable = _usable(bench.cluster, f"--max {value}")
    needs_batch(bench, plan, f"--max {value}")
    if value == "micro-batch":
        limit, stop = LARGEST_MICRO_BATCH, f"micro_batch {LARGEST_MICRO_BATCH} is where the search stops"
        start = plan.micro_batch
    else:
        needs_length(bench, plan, f"--max {value}")
        table = position_table(bench.subject)
        limit, stop = table or (LONGEST_SEQ_LEN, f"{LONGEST_SEQ_LEN} is where the search stops")
        start = min(plan.seq_len or 1, limit)
    tried = trying(bench, plan, value)
    answer, following = largest(tried, start, limit, most_probes=most_probes)
    exact = answer is None or following is not None or answer.value >= limit
    if not exact:
        stop = f"--max {value} finds the last"
    sure = largest(tried, answer.value, answer.value, SURE)[0] if answer and exact else None
    notes = []
    if value == "micro-batch" and answer is not None and answer.value != plan.micro_batch:
        changed = replace(plan, micro_batch=answer.value)
        notes.append(
            f"global batch {plan.global_batch} becomes {changed.global_batch} at accumulation {plan.accumulation}"
        )
    return Reach(
        asked="max micro-batch" if value == "micro-batch" else "max seq-len",
        plan=plan,
        usable_bytes=usable,
        answer=answer,
        next=following,
        stopped_by=following.why if following is not None else stop,
        sure_value=sure.value if sure else None,
        exact=exact,
        notes=tuple(notes),
    )


def trying(bench: Bench, plan: Plan, value: Literal["micro-batch", "seq-len"]) -> Tried:
    """Probes of the plan with other values."""

    def attempt(number: int) -> Probe:
        varied = replace(plan, micro_batch=number) if value == "micro-batch" else replace(plan, seq_len=number)
        return probe(bench, varied, number)

    return Tried(attempt, _usable(bench.cluster, f"--max {value}"))


def fewest_gpus(bench: Bench, plan: Plan, global_batch: int | None) -> Reach:
    """The smallest cluster on which this plan fits: data parallel grows, micro_batch, tp and pp stay.

    global_batch: what a configuration's train_batch_size keeps; accumulation gives way to it. Problem where the GPU is of
    unknown kind.
    """
    usable = _usable(bench.cluster, "--min gpus")
    needs_batch(bench, plan, "--min gpus")
    sizes = cluster_sizes(bench.cluster, plan.layout.ranks // plan.layout.dp_shard)
    batches = {size.ranks: regrouped(plan, size.ranks, global_batch) for size in sizes}
    known: dict[int, Probe] = {}

    def attempt(index: int) -> Probe:
        if index not in known:
            ranks = sizes[index].ranks
            known[index] = probe(bench, batches[ranks], ranks, sizes[index])
        return known[index]

    last = len(sizes) - 1
    index, step = 0, 1
    failing = -1
    while not attempt(index).fits and index < last:  # ever larger steps, then back between the last two
        failing, index, step = index, min(last, index + step), 2 * step
    if not attempt(index).fits:
        nearest = attempt(0)
        why = attempt(last).why
        return Reach(
            asked="min gpus",
            plan=plan,
            usable_bytes=usable,
            answer=None,
            next=attempt(last),
            stopped_by=f"{why} on {sizes[last].ranks} GPUs too" + _shares_nothing(plan, nearest, attempt(last)),
        )
    while index - failing > 1:
        middle = (index + failing) // 2
        if attempt(middle).fits:
            index = middle
        else:
            failing = middle
    answer = attempt(index)
    sure = next((attempt(i).value for i in range(index, min(index + 8, last + 1)) if attempt(i).sure), None)
    chosen = batches[answer.value]
    notes = []
    if global_batch is not None and chosen.global_batch != global_batch:
        notes.append(
            f"train_batch_size {global_batch} is no whole number of micro-batches there (micro_batch {chosen.micro_batch} x dp "
            f"{chosen.layout.dp}): the global batch would be {chosen.global_batch}"
        )
    elif chosen.accumulation != plan.accumulation:
        notes.append(f"accumulation {plan.accumulation} becomes {chosen.accumulation}, so that the global batch stays")
    elif chosen.global_batch != plan.global_batch:
        notes.append(f"global batch {plan.global_batch} becomes {chosen.global_batch}")
    return Reach(
        asked="min gpus",
        plan=chosen,
        usable_bytes=usable,
        answer=answer,
        next=attempt(failing) if failing >= 0 else None,
        stopped_by=attempt(failing).why if failing >= 0 else "no cluster is smaller",
        sure_value=sure,
        notes=tuple(notes),
    )


def cluster_sizes(cluster: Cluster, together: int) -> list[Cluster]:
    """Clusters of that kind, small to large, whose GPUs `together` divides: parts of a node that divide it, then whole nodes."""
    per_node = cluster.gpus_per_node
    name = cluster.gpu.name if cluster.gpu else ""

    def sized(nodes: int, gpus: int) -> Cluster:
        text = f"{nodes}x{gpus}x{name}" if nodes > 1 else f"{gpus}x{name}"
        return replace(cluster, nodes=nodes, gpus_per_node=gpus, text=text)

    parts = [sized(1, n) for n in range(1, per_node + 1) if per_node % n == 0]
    nodes = [sized(n, per_node) for n in range(2, max(2, MOST_GPUS // per_node) + 1)]
    sizes = [size for size in (*parts, *nodes) if size.ranks % together == 0]
    if not sizes:
        raise Problem(f"--min gpus: no cluster of nodes of {per_node} GPUs is a multiple of {together} (tp x pp x sp)")
    return sizes


def probe(bench: Bench, plan: Plan, value: int, cluster: Cluster | None = None) -> Probe:
    """What the plan takes. A value that the model refuses does not fit either, and says why."""
    cluster = cluster or bench.cluster
    try:
        row = bench.row(plan, cluster)
    except Problem as problem:
        return Probe(value=value, fits=False, verdict="refused", why=f"the model refuses it: {problem}")
    return probe_of(row, value, cluster)


def probe_of(row: Row, value: int, cluster: Cluster) -> Probe:
    memory = row.memory
    usable = cluster.gpu.usable_bytes if cluster.gpu else None
    room = usable - memory.device_bytes if usable is not None and memory.device_bytes is not None else None
    return Probe(
        value=value,
        fits=row.verdict in FITTING,
        verdict=row.verdict,
        why=why_not(row, cluster),
        allocated_bytes=memory.allocated_bytes,
        device_bytes=memory.device_bytes,
        device_bytes_low=memory.device_bytes_low,
        device_bytes_high=memory.device_bytes_high,
        host_bytes=memory.host_bytes,
        room_bytes=room,
        global_batch=row.plan.global_batch,
    )


def why_not(row: Row, cluster: Cluster) -> str:
    """Why the row does not fit; empty where it does."""
    usable = cluster.gpu.usable_bytes if cluster.gpu else None
    if row.verdict == "oom" and usable is not None and row.memory.device_bytes is not None:
        taken = row.memory.device_bytes
        return f"{gib(taken)} GiB on a GPU, {gib(taken - usable)} GiB more than it has"
    if row.verdict == "host_oom" and row.ledger is not None and cluster.host_memory_bytes is not None:
        phase, taken = max(host_phases(row.ledger, row.plan, cluster), key=lambda pair: pair[1])
        when = {"load": " while it loads", "save": " while it saves"}.get(phase, "")
        return f"{gib(taken)} GiB of a node's host memory{when}, {gib(taken - cluster.host_memory_bytes)} GiB more than it has"
    return ""


class Tried:
    """Probes by value, each made once."""

    def __init__(self, attempt: Try, usable_bytes: int):
        self._attempt, self.usable_bytes = attempt, usable_bytes
        self.by_value: dict[int, Probe] = {}

    def __call__(self, value: int) -> Probe:
        if value not in self.by_value:
            self.by_value[value] = self._attempt(value)
        return self.by_value[value]


@dataclass(frozen=True, slots=True)
class Measure:
    """By which bytes a probe fits. bytes: what grows steadily with the value; beside: what else is on the device."""

    fits: Callable[[Probe], bool]
    bytes: Callable[[Probe], int | None]
    beside: Callable[[Probe], int]


LIKELY = Measure(
    lambda probe: probe.fits,
    lambda probe: probe.allocated_bytes,
    lambda probe: (probe.device_bytes or 0) - (probe.allocated_bytes or 0),
)
"""Near the limit the allocator gives back what it caches, so that the device's bytes stand still; those allocated do not."""
SURE = Measure(lambda probe: probe.sure, lambda probe: probe.device_bytes_high, lambda probe: 0)


def largest(
    tried: Tried, start: int, limit: int, by: Measure = LIKELY, most_probes: int | None = None
) -> tuple[Probe | None, Probe | None]:
    """(the largest value that fits, the next one); values go from 1 to `limit`, and what fits once stops fitting but once.

    None: even 1 does not fit; or nothing up to `limit` fails. Each guess is on the line through two probes, so that bytes
    linear in the value take four probes; every fourth guess is the middle of what is open.
    """
    good, bad = 0, limit + 1
    for value, probe in tried.by_value.items():
        if value <= limit:
            good, bad = (max(good, value), bad) if by.fits(probe) else (good, min(bad, value))
    value, turn, stride = min(max(start, 1), limit), 0, 1
    while bad - good > 1 and (most_probes is None or len(tried.by_value) < most_probes):
        if by.fits(tried(value)):
            good = max(good, value)
        else:
            bad = min(bad, value)
        turn += 1
        guess = _guess(tried, by)
        value = _between(good, bad, limit, guess, turn, stride)
        if guess is not None and guess <= good + stride:
            stride *= 4  # the line ends where it began, and what fits may reach much further
    return (tried(good) if good else None), (tried(bad) if bad <= limit and bad - good == 1 else None)


def _guess(tried: Tried, by: Measure) -> int | None:
    """The value at which a line through the two probes nearest to the limit reaches it; None where there is no such line."""
    known = [probe for probe in tried.by_value.values() if by.bytes(probe) is not None]
    if len(known) < 2:
        return None
    limit = tried.usable_bytes - min(by.beside(probe) for probe in known)
    points = sorted((probe.value, by.bytes(probe) or 0) for probe in known)
    at = min(max(bisect_left([taken for _, taken in points], limit), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    return None if y1 <= y0 else x0 + (limit - y0) * (x1 - x0) // (y1 - y0)


def _between(good: int, bad: int, limit: int, guess: int | None, turn: int, stride: int) -> int:
    """The next value to try. While nothing has failed, up to 1024 times as far as what fits, and at least `stride` further."""
    if bad > limit:
        further = 2 * good if guess is None else min(guess, 1024 * max(good, 1))
        return min(max(further, good + stride), limit)
    if guess is None or turn % 4 == 0:
        return (good + bad) // 2
    return min(max(guess, good + 1), bad - 1)


def _usable(cluster: Cluster, option: str) -> int:
    if cluster.gpu is None:
        raise Problem(
            f"{option} needs a GPU to fill, but the kind of GPU is not known; name it, as in --cluster "
            f"{cluster.ranks}xA100-80GB"
        )
    return cluster.gpu.usable_bytes


def needs_batch(bench: Bench, plan: Plan, option: str) -> None:
    if not bench.traced(plan).segments:
        raise Problem(
            f"{option}: {bench.subject.source} has no sample batch, so its activations are not known; add "
            "sample_batch(micro_batch, seq_len=None) to the model file"
        )


def needs_length(bench: Bench, plan: Plan, option: str) -> None:
    """Problem where the model is not fed by length."""
    from dsplan.planner.models.load import ModelSubject

    subject = bench.subject
    if not isinstance(subject, ModelSubject):
        raise Problem(
            f"{option}: {subject.source} is a script, which feeds sequences of its own length; ask with a model file, or run the "
            "script with its own option for the length after --"
        )
    from dsplan.planner.tracing.tracer import sample
    from torch.utils._pytree import tree_leaves

    def shapes(seq_len: int) -> list[tuple[int, ...]]:
        batch = sample(subject, plan.micro_batch, seq_len)
        return [tuple(leaf.shape) for leaf in tree_leaves(batch) if hasattr(leaf, "shape")]

    if shapes(8) == shapes(16):
        raise Problem(
            f"{option}: the batch of {subject.source} is of the same shape at seq_len 8 and 16, so it has no length to vary; let "
            "sample_batch(micro_batch, seq_len) use its seq_len"
        )


def _shares_nothing(plan: Plan, first: Probe, last: Probe) -> str:
    if first.device_bytes is None or last.device_bytes is None or last.device_bytes < 0.98 * first.device_bytes:
        return ""
    if plan.zero_stage == 0:
        return ": zero 0 shares nothing out among data-parallel ranks"
    return ": what is left does not depend on their number"
