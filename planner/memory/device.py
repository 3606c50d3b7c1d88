"""From allocated bytes to what the allocator reserves and what nvidia-smi shows, and to a verdict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dsplan.schemas.cluster import Cluster
from dsplan.schemas.estimate import Memory, Verdict
from dsplan.schemas.ledger import Ledger
from dsplan.schemas.plan import Plan
from dsplan.schemas.units import GIB


@dataclass(frozen=True, slots=True)
class Span:
    """A likely value, and what bounds it."""

    low: float
    likely: float
    high: float
    source: str


RESERVED = Span(
    1.010,
    1.035,
    1.060,
    "caching-allocator replay of recorded Llama-7B and 8B steps: +1.0 to +5.7 % over allocated",
)
RESERVED_STAGE3_DEEPSPEED = Span(
    1.014,
    1.120,
    1.260,
    "the same replay of DeepSpeed 0.19.8 ZeRO-3, Llama-2-7B: +1.4 % (expandable) to +26 % (native)",
)
CONTEXT_BYTES = Span(
    0.4 * GIB,
    0.5 * GIB,
    0.7 * GIB,
    "CUDA context with PyTorch's kernels; 0.4 to 0.7 GiB by GPU and driver, not fitted",
)
COMMUNICATOR_BYTES = Span(
    0.4 * GIB,
    0.6 * GIB,
    0.8 * GIB,
    "NCCL buffers of one to three process groups; with the context 1.0 to 1.5 GiB",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBytes:
    """reserved: held by the caching allocator at the peak. device: with context and communicators."""

    reserved_bytes: int
    device_bytes: int
    device_bytes_low: int
    device_bytes_high: int


def device_bytes(ledger: Ledger, plan: Plan) -> DeviceBytes:
    """What the ledger's peak takes on a GPU. Communicators count only where there is more than one rank."""
    stage3 = plan.engine == "deepspeed" and plan.zero_stage == 3
    reserved = RESERVED_STAGE3_DEEPSPEED if stage3 else RESERVED
    links = 1 if plan.layout.ranks > 1 else 0

    def total(bound: Callable[[Span], float]) -> int:
        return round(
            ledger.allocated_bytes * bound(reserved) + bound(CONTEXT_BYTES) + links * bound(COMMUNICATOR_BYTES)
        )

    return DeviceBytes(
        reserved_bytes=round(ledger.allocated_bytes * reserved.likely),
        device_bytes=total(lambda span: span.likely),
        device_bytes_low=total(lambda span: span.low),
        device_bytes_high=total(lambda span: span.high),
    )


def verdict(device_bytes: int | None, device_bytes_high: int | None, usable_bytes: int | None) -> Verdict:
    """oom: the likely bytes exceed what PyTorch sees of the GPU; tight: only the upper bound; unknown: no GPU."""
    if device_bytes is None or usable_bytes is None:
        return "unknown"
    if device_bytes > usable_bytes:
        return "oom"
    return "tight" if device_bytes_high is not None and device_bytes_high > usable_bytes else "fits"


def device_memory(ledger: Ledger, plan: Plan, cluster: Cluster) -> tuple[Memory, Verdict]:
    """The ledger's peak by category, what it takes on the device, and whether it fits. host_bytes is per node."""
    peak, device = ledger.peak, device_bytes(ledger, plan)
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
    usable = cluster.gpu.usable_bytes if cluster.gpu else None
    return memory, verdict(device.device_bytes, device.device_bytes_high, usable)
