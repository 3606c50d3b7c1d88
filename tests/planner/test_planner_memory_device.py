"""From allocated bytes to the device, and the verdict of the contract."""

import pytest
from dsplan.planner.memory.device import COMMUNICATOR_BYTES, CONTEXT_BYTES, device_bytes, device_memory, verdict
from dsplan.schemas.cluster import parse_cluster
from dsplan.schemas.layout import Layout
from dsplan.schemas.ledger import CATEGORIES, Ledger, MemoryItem, Moment
from dsplan.schemas.plan import Plan
from dsplan.schemas.units import GIB


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


def test_the_interval_holds_the_likely_value_and_communicators_need_company():
    alone, many = device_bytes(book(10), plan(dp=1)), device_bytes(book(10), plan())
    for found in (alone, many):
        assert found.device_bytes_low < found.device_bytes < found.device_bytes_high
        assert 10 * GIB <= found.reserved_bytes < found.device_bytes
    assert many.device_bytes - alone.device_bytes == pytest.approx(COMMUNICATOR_BYTES.likely)
    both = CONTEXT_BYTES.likely + COMMUNICATOR_BYTES.likely
    assert GIB <= both <= 1.5 * GIB


def test_stage_3_of_deepspeed_fragments_more():
    gathered = device_bytes(book(10), plan(engine="deepspeed", zero_stage=3))
    assert gathered.reserved_bytes > device_bytes(book(10), plan(engine="deepspeed")).reserved_bytes


def test_categories_add_up_and_the_host_counts_per_node():
    memory, said = device_memory(book(70, host_bytes=5), plan(dp=16), parse_cluster("2x8xA100-80GB"))
    parts = sum(getattr(memory, f"{name}_bytes") for name in CATEGORIES)
    assert parts == memory.allocated_bytes
    assert memory.host_bytes == 8 * 5
    assert said == "fits"
    assert device_memory(book(78), plan(), parse_cluster("8xA100-80GB"))[1] == "oom"
    assert device_memory(book(78), plan(), parse_cluster("8"))[1] == "unknown"
