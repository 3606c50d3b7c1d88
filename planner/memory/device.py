"""From allocated bytes to what the allocator reserves and what nvidia-smi shows, and to a verdict."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

from dsplan.planner.memory.allocator import Reserved
from dsplan.planner.memory.deepspeed.requests import loads_into_cache
from dsplan.planner.memory.requests import Requests, requests_of
from dsplan.schemas.cluster import Cluster, Gpu
from dsplan.schemas.estimate import Memory, Verdict
from dsplan.schemas.layout import Layout
from dsplan.schemas.ledger import Ledger
from dsplan.schemas.overheads import overheads
from dsplan.schemas.plan import Plan
from dsplan.schemas.trace import Events, Trace
from dsplan.schemas.units import PRECISION_BYTES


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """Reserved over allocated bytes, 1.0 and above. least: where every cached segment that can be given back is."""

    least: Callable[[], float]
    likely: float
    high: float
    source: str


UNTRACED = Fragmentation(
    lambda: 1.01,
    1.035,
    1.06,
    "caching-allocator replay of recorded Llama-7B and 8B steps: +1.0 to +5.7 % over allocated",
)
"""Where no requests are known."""
BEYOND_REPLAY = 1.03
"""What the upper bound adds to a replay: the small pool, other streams and allocations inside kernels are not in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBytes:
    """reserved: held by the caching allocator at the peak. device: with context and communicators."""

    reserved_bytes: int
    device_bytes: int
    device_bytes_low: int
    device_bytes_high: int


def device_bytes(
    ledger: Ledger,
    plan: Plan,
    gpu: Gpu | None = None,
    fragmentation: Fragmentation = UNTRACED,
) -> DeviceBytes:
    """What the ledger's peak takes on a GPU. Communicators count only where there is more than one rank.

    Cached segments are given back before a request is refused, so that reserved bytes stay within the GPU while that is
    enough. low: nothing is reserved beyond what is allocated.
    """
    beside = overheads(gpu)
    links = 1 if plan.layout.ranks > 1 else 0
    workspace = beside.matmul_workspace_bytes  # one request of its own: nothing fragments in it
    allocated = ledger.allocated_bytes + workspace
    # cached segments of loading are in the replay, or given back after it
    steps = [moment.allocated_bytes for moment in ledger.moments if moment.phase != "load" or loads_into_cache(plan)]
    stepping = max(steps, default=0)
    others = beside.context.likely + links * beside.communicators.likely
    reserved = max(allocated, round(stepping * fragmentation.likely) + workspace)
    room = gpu.usable_bytes - others if gpu else reserved
    if reserved > room:
        reserved = (
            allocated if allocated > room else max(room, allocated, round(stepping * fragmentation.least()) + workspace)
        )
    return DeviceBytes(
        reserved_bytes=reserved,
        device_bytes=reserved + others,
        device_bytes_low=allocated + beside.context.low + links * beside.communicators.low,
        device_bytes_high=max(allocated, round(stepping * fragmentation.high) + workspace)
        + beside.context.high
        + links * beside.communicators.high,
    )


def fragmentation_of(requests: Requests, *, expandable: bool = False) -> Fragmentation:
    """Of a replay of these requests on an endless device."""
    found = requests.replay(expandable=expandable)
    ratio = max(1.0, found.reserved_bytes / max(1, found.allocated_bytes))
    least = functools.cache(functools.partial(_least, requests, found))
    return Fragmentation(least, ratio, ratio * BEYOND_REPLAY, "replay through a model of PyTorch's caching allocator")


def _least(requests: Requests, found: Reserved) -> float:
    """The smallest device on which the requests still come through, over what is allocated; to one part in a hundred."""
    low, high = 1.0, max(1.0, found.reserved_bytes / max(1, found.allocated_bytes))
    while high - low > 0.01:
        middle = (low + high) / 2
        if requests.replay(limit_bytes=round(middle * found.allocated_bytes)).out_of_memory:
            low = middle
        else:
            high = middle
    return high


def traced_fragmentation(trace: Trace, plan: Plan, expandable: bool = False) -> Fragmentation:
    """Of a plan on this trace; remembered. Plans that differ in degrees share what the first of them has, at tp 1, pp 1."""
    key = (
        id(trace.events),  # of fp16 and bf16 they may be the same ones
        PRECISION_BYTES[plan.precision],
        plan.engine,
        min(plan.zero_stage, 2) if plan.zero_stage < 3 else 3,
        plan.offload,
        plan.optimizer,
        plan.layout.dp > 1,
        loads_into_cache(plan),
        expandable,
    )
    found = _remembered.get(key)
    if found is None or found[0] is not trace.events:
        if len(_remembered) > 512:
            _remembered.clear()
        layout = plan.layout if plan.layout.tp == plan.layout.pp == 1 else Layout(dp_shard=plan.layout.dp)
        requests = requests_of(trace, replace(plan, layout=layout))
        made = fragmentation_of(requests, expandable=expandable) if requests else UNTRACED
        found = _remembered[key] = (trace.events, made)
    return found[1]


_remembered: dict[tuple[object, ...], tuple[Events, Fragmentation]] = {}


def verdict(device_bytes: int | None, device_bytes_high: int | None, usable_bytes: int | None) -> Verdict:
    """oom: the likely bytes exceed what PyTorch sees of the GPU; tight: only the upper bound; unknown: no GPU."""
    if device_bytes is None or usable_bytes is None:
        return "unknown"
    if device_bytes > usable_bytes:
        return "oom"
    return "tight" if device_bytes_high is not None and device_bytes_high > usable_bytes else "fits"


def device_memory(
    ledger: Ledger,
    plan: Plan,
    cluster: Cluster,
    trace: Trace | None = None,
    requests: Requests | None = None,
    *,
    expandable: bool = False,
) -> tuple[Memory, Verdict]:
    """The ledger's peak by category, what it takes on the device, and whether it fits. host_bytes is per node.

    requests: those that a rehearsal has recorded, else those of the plan on this trace. expandable: the run sets
    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, if the cluster does not say so. MIG slices are not considered: the GPU
    is whole. The host is too small where any phase takes more than a node has.
    """
    expandable = expandable or cluster.expandable_segments
    fragmentation = UNTRACED
    if requests is not None:
        fragmentation = fragmentation_of(requests, expandable=expandable)
    elif trace is not None:
        fragmentation = traced_fragmentation(trace, plan, expandable)
    peak, device = ledger.peak, device_bytes(ledger, plan, cluster.gpu, fragmentation)
    memory = Memory(
        params_bytes=peak.category_bytes("params"),
        grads_bytes=peak.category_bytes("grads"),
        optimizer_bytes=peak.category_bytes("optimizer"),
        activations_bytes=peak.category_bytes("activations"),
        gathered_params_bytes=peak.category_bytes("gathered_params"),
        buckets_bytes=peak.category_bytes("buckets"),
        temporary_bytes=peak.category_bytes("temporary"),
        allocated_bytes=peak.allocated_bytes,
        reserved_bytes=device.reserved_bytes,
        device_bytes=device.device_bytes,
        device_bytes_low=device.device_bytes_low,
        device_bytes_high=device.device_bytes_high,
        host_bytes=ledger.host_bytes * min(cluster.gpus_per_node, plan.layout.ranks),
    )
    said = verdict(device.device_bytes, device.device_bytes_high, cluster.gpu.usable_bytes if cluster.gpu else None)
    if said != "oom" and cluster.host_memory_bytes is not None:
        most = max(held for _, held in host_phases(ledger, plan, cluster))
        said = "host_oom" if most > cluster.host_memory_bytes else said
    return memory, said


def host_phases(ledger: Ledger, plan: Plan, cluster: Cluster) -> tuple[tuple[str, int], ...]:
    """(phase, bytes of host memory on a node): every rank loads, every rank holds what is offloaded, rank 0 alone saves."""
    ranks = min(cluster.gpus_per_node, plan.layout.ranks)
    training = ledger.host_bytes * ranks
    return (
        ("load", ledger.load_host_bytes * ranks),
        ("train", training),
        ("save", training + ledger.save_host_bytes if ledger.save_host_bytes else 0),
    )
