"""From allocated bytes to the device, and the verdict of the contract."""

import functools
from dataclasses import replace
from pathlib import Path

import pytest
from dsplan.planner.memory import ledger
from dsplan.planner.memory.device import UNTRACED, Fragmentation, device_bytes, device_memory, verdict
from dsplan.planner.memory.requests import recorded, requests_of
from dsplan.planner.models.load import load_subject
from dsplan.planner.tracing.tracer import trace
from dsplan.schemas.choices import ZeroKnobs
from dsplan.schemas.cluster import find_gpu, parse_cluster
from dsplan.schemas.layout import Layout
from dsplan.schemas.ledger import CATEGORIES, Ledger, MemoryItem, Moment
from dsplan.schemas.overheads import overheads
from dsplan.schemas.plan import Plan
from dsplan.schemas.units import GIB

ROOT = Path(__file__).parents[2]


def plan(dp: int = 8, engine="native", zero_stage: int = 2) -> Plan:
    layout = Layout(dp_shard=dp)
    return Plan(engine=engine, layout=layout, zero_stage=zero_stage, precision="bf16", micro_batch=1, accumulation=1)


def book(gib: float, host_bytes: int = 0) -> Ledger:
    items = tuple(
        MemoryItem(category=name, bytes=round(gib * GIB / len(CATEGORIES)), why="test") for name in CATEGORIES
    )
    moment = Moment(phase="backward", where="test", items=items)
    return Ledger(engine="native", level="formula", moments=(moment,), resident_bytes=0, host_bytes=host_bytes)


@pytest.mark.parametrize(
    ("likely", "high", "usable", "said"),
    [
        (10, 12, 12, "fits"),
        (10, 13, 12, "tight"),
        (13, 15, 12, "oom"),
        (13, 15, None, "unknown"),
        (None, None, 12, "unknown"),
    ],
)
def test_verdict(likely, high, usable, said):
    assert verdict(likely, high, usable) == said


MIB = GIB // 1024


def test_the_interval_holds_the_likely_value_and_communicators_need_company():
    alone, many = device_bytes(book(10), plan(dp=1)), device_bytes(book(10), plan())
    for found in (alone, many):
        assert found.device_bytes_low < found.device_bytes < found.device_bytes_high
        assert 10 * GIB <= found.reserved_bytes < found.device_bytes
    beside = overheads(None)
    assert many.device_bytes - alone.device_bytes == beside.communicators.likely
    both = beside.context.likely + beside.communicators.likely
    assert GIB <= both <= 1.5 * GIB


def test_workspaces_of_matrix_products_are_larger_on_hopper():
    """torch/backends/cuda: CUBLAS_WORKSPACE_CONFIG is :4096:2:16:8 (8.125 MiB), and 32 MiB on sm90."""
    assert overheads(find_gpu("A100-80GB")).matmul_workspace_bytes == 8.125 * MIB
    assert overheads(find_gpu("H100-80GB")).matmul_workspace_bytes == 32 * MIB


def test_reserved_is_never_below_allocated_nor_above_the_gpu_while_that_is_enough():
    gpu = find_gpu("A100-40GB")
    loose = Fragmentation(lambda: 1.0, 1.5, 1.6, "test")
    held = device_bytes(book(30), plan(), gpu, loose)
    assert held.device_bytes == gpu.usable_bytes  # 45 GiB of cached blocks are given back before a request is refused
    assert held.device_bytes_high > gpu.usable_bytes
    tight = device_bytes(book(30), plan(), gpu, replace(loose, least=lambda: 1.4))
    assert tight.device_bytes > gpu.usable_bytes  # no segment is free as a whole
    over = device_bytes(book(39.5), plan(), gpu, loose)
    assert over.reserved_bytes >= round(39.5 * GIB)
    assert over.device_bytes > gpu.usable_bytes
    assert device_bytes(book(30), plan(), None, loose).reserved_bytes > 45 * GIB


def test_a_run_without_a_trace_has_the_ratio_of_recorded_ones():
    found = device_bytes(book(10), plan())
    expected = UNTRACED.likely * 10 * GIB + overheads(None).matmul_workspace_bytes
    assert found.reserved_bytes == pytest.approx(expected, rel=1e-6)


def test_the_host_has_a_verdict_where_its_memory_is_known():
    small = replace(parse_cluster("8xA100-80GB"), host_memory_bytes=7 * GIB)
    assert device_memory(book(10, host_bytes=GIB), plan(), small)[1] == "host_oom"
    assert device_memory(book(10, host_bytes=GIB), plan(), replace(small, host_memory_bytes=8 * GIB))[1] == "fits"
    assert device_memory(book(78, host_bytes=GIB), plan(), small)[1] == "oom"  # the GPU comes first


def test_a_recorded_step_is_replayed_twice_from_what_is_resident():
    """Storage 1 stays; 2 and 3 are made in the step, and 3 is left over at its end."""
    step = [(1, 40 * MIB), (2, 12 * MIB), (2, -12 * MIB), (3, 24 * MIB)]
    found = recorded(step, 1)
    assert found.events == [*step, (3, -24 * MIB), *step[1:], (3, -24 * MIB)]
    peaks = found.replay()
    assert (peaks.allocated_bytes, peaks.reserved_bytes) == (64 * MIB, 76 * MIB)


@pytest.mark.parametrize("engine", ["native", "deepspeed"])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_requests_hold_what_the_ledger_counts(engine, zero_stage, recompute):
    """Two independent sums: events of an engine told in the allocator's words, and its rows in closed form."""
    knobs = ZeroKnobs(reduce_bucket_size=200_000, prefetch_bucket_size=200_000)
    asked = replace(
        plan(dp=4, engine=engine, zero_stage=zero_stage), recompute=recompute, micro_batch=4, seq_len=1024, knobs=knobs
    )
    traced = trace(subject(), precision="bf16", recompute=recompute, micro_batch=4, seq_len=1024)
    requests = requests_of(traced, asked)
    assert requests is not None
    found = requests.replay()
    assert found.reserved_bytes >= found.allocated_bytes
    book = ledger(traced, asked)
    counted = max(map(book.phase_bytes, ("forward", "backward")))
    # at stage 0 the step, which is told here by its largest temporaries alone, is near the peak of backward
    assert found.allocated_bytes == pytest.approx(counted, rel=0.05 if zero_stage else 0.12)
    device, _ = device_memory(book, asked, parse_cluster("4xA100-80GB"), traced)
    assert device.reserved_bytes >= device.allocated_bytes


@functools.cache
def subject():
    return load_subject(
        str(ROOT / "examples" / "gpt.py"), sets={"layers": "12", "width": "512", "heads": "8", "vocab": "2048"}
    )


def test_categories_add_up_and_the_host_counts_per_node():
    memory, said = device_memory(book(70, host_bytes=5), plan(dp=16), parse_cluster("2x8xA100-80GB"))
    parts = sum(getattr(memory, f"{name}_bytes") for name in CATEGORIES)
    assert parts == memory.allocated_bytes
    assert memory.host_bytes == 8 * 5
    assert said == "fits"
    assert device_memory(book(78), plan(), parse_cluster("8xA100-80GB"))[1] == "oom"
    assert device_memory(book(78), plan(), parse_cluster("8"))[1] == "unknown"


@pytest.mark.parametrize("offload", ["none", "param"])
def test_a_model_made_whole_is_on_the_device_before_stage_3_splits_it(offload):
    subject = load_subject(str(ROOT / "examples/gpt.py"), seq_len=64)
    traced = trace(subject, precision="bf16", recompute="none", micro_batch=1, seq_len=64)
    whole = replace(plan(engine="deepspeed", zero_stage=3), offload=offload)
    shards = replace(whole, built="meta")
    sixteen_bit = sum(2 * param.numel for param in traced.all_params)
    load, by_shards = (ledger(traced, each).phase_bytes("load") for each in (whole, shards))
    assert load == max(by_shards, sixteen_bit + traced.buffer_bytes)
    cached = [requests_of(traced, each).events for each in (whole, shards)]
    moved = sum(delta for _, delta in cached[0] if delta > 0) - sum(delta for _, delta in cached[1] if delta > 0)
    assert moved == (sixteen_bit if offload == "param" else 0)  # else DeepSpeed empties the cache


def test_a_tiny_model_takes_a_few_segments_not_a_multiple_of_the_workspace():
    """1 KiB in one 2 MiB segment of the allocator's small pool (CUDACachingAllocator.cpp, kSmallBuffer)."""
    tiny = Fragmentation(lambda: 2048.0, 2048.0, 2048.0, "2 MiB over 1 KiB")
    kib = Ledger(
        engine="native",
        level="formula",
        moments=(Moment(phase="step", where="", items=(MemoryItem(category="params", bytes=1024, why="test"),)),),
        resident_bytes=0,
    )
    found = device_bytes(kib, plan(dp=1), find_gpu("A100-80GB"), tiny)
    assert found.reserved_bytes == 2 * MIB + 8.125 * MIB
