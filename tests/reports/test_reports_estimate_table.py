"""The estimate's table as people see it, whole, and what it leaves out. The values are made by hand."""

from dataclasses import replace
from pathlib import Path

from dsplan.reports.estimate_table import MOST_ROWS, as_markdown, as_text, shown_rows
from dsplan.schemas.cluster import Cluster, find_gpu
from dsplan.schemas.estimate import Estimate, Memory, ModelFacts, Row, StepTime
from dsplan.schemas.layout import Layout
from dsplan.schemas.ledger import Ledger, MemoryItem, Moment
from dsplan.schemas.plan import Plan
from dsplan.schemas.units import GIB, KIB, MIB

GOLDEN = Path(__file__).parent.parent / "golden"
ITEMS = (
    MemoryItem(category="params", bytes=GIB, why="4 B x 268 M params"),
    MemoryItem(category="activations", bytes=2 * GIB, why="traced 2 GiB"),
)
LEDGER = Ledger(
    engine="native",
    level="formula",
    moments=(Moment(phase="backward", where="backward of blocks.3", items=ITEMS),),
    resident_bytes=GIB,
)


def row(zero_stage: int, step_seconds: float | None = 0.5, **more: object) -> Row:
    plan = Plan(
        engine="native",
        layout=Layout(dp_shard=8),
        zero_stage=zero_stage,
        precision="bf16",
        micro_batch=1,
        accumulation=2,
        seq_len=128,
    )
    memory = Memory(
        params_bytes=GIB,
        grads_bytes=0,
        optimizer_bytes=0,
        activations_bytes=2 * GIB,
        gathered_params_bytes=0,
        buckets_bytes=0,
        temporary_bytes=0,
        allocated_bytes=3 * GIB,
        reserved_bytes=3 * GIB,
        device_bytes=4 * GIB,
        device_bytes_low=3 * GIB,
        device_bytes_high=5 * GIB,
        host_bytes=0,
    )
    time = StepTime()
    if step_seconds is not None:
        time = replace(
            time,
            step_seconds=step_seconds,
            samples_per_second=16 / step_seconds,
            tokens_per_second_per_gpu=512.0,
            mfu=0.4,
        )
    made = Row(plan=plan, level="formula", memory=memory, time=time, verdict="fits", runnable=True, ledger=LEDGER)
    return replace(made, **more)  # type: ignore[arg-type]


def estimate(*rows: Row, own: int | None = None) -> Estimate:
    return Estimate(
        model=ModelFacts(
            source="model.py",
            params=268_435_456,
            trainable_params=134_217_728,
            forward_flops=2.5e12,
            flops_source="fvcore",
            shapes_sha256="0",
        ),
        cluster=Cluster(nodes=1, gpus_per_node=8, gpu=find_gpu("A100-80GB"), text="8xA100-80GB"),
        engine="native",
        engine_version="1.2.3",
        rows=rows,
        skipped={"pp 3 does not divide the 8 GPUs": 2},
        own=own,
    )


def test_the_whole_report(update_golden: bool) -> None:
    text = as_text(estimate(row(2), row(0, runnable=False), own=0), formulas=True)
    golden = GOLDEN / "estimate.txt"
    if update_golden:
        golden.write_text(text + "\n", "utf-8")
    assert text + "\n" == golden.read_text("utf-8")


def test_the_first_two_lines_say_for_what() -> None:
    first, second = as_text(estimate(row(2))).splitlines()[:2]
    assert first == (
        "engine native 1.2.3 (formula); model model.py: 268,435,456 parameters, 134 M trainable; "
        "forward 2.5 TFLOP by fvcore"
    )
    assert second.startswith("batch: global 16 = micro_batch 1 x accumulation 2 x dp 8; sequence 128; recompute none;")


def test_without_all_eight_rows_are_shown_after_the_users_own() -> None:
    rows = [row(0, step_seconds=1.0 + index) for index in range(12)]
    shown = shown_rows(estimate(*rows, own=0), everything=False)
    assert shown[0] is rows[0]
    assert len(shown) == 1 + MOST_ROWS
    assert "3 more rows: --all shows them." in as_text(estimate(*rows, own=0))
    assert shown_rows(estimate(*rows, own=0), everything=True) == tuple(rows)


def test_what_fits_and_is_fast_comes_first() -> None:
    slow, fast, oom = row(0, step_seconds=2.0), row(1, step_seconds=1.0), row(2, step_seconds=0.1, verdict="oom")
    padding = [row(3, step_seconds=3.0 + index) for index in range(9)]
    shown = shown_rows(estimate(slow, oom, fast, *padding), everything=False)
    assert shown[:2] == (fast, slow)
    assert oom not in shown


def test_columns_without_anything_to_say_are_left_out() -> None:
    head = as_text(estimate(row(2, step_seconds=None))).splitlines()[3]
    assert "MFU" not in head and "host" not in head and "verdict" in head


def test_all_columns_of_bytes_are_in_the_one_unit_that_is_named() -> None:
    """1 MiB of parameters beside 512 MiB of the device; and a model of KiB beside a device that is never so small."""
    sizes = {"device_bytes": 512 * MIB, "device_bytes_low": 256 * MIB, "device_bytes_high": 768 * MIB}
    for unit, shown in ((MIB, "1.00"), (KIB, "0.00098")):
        held = {"params_bytes": unit, "activations_bytes": 512 * unit, "allocated_bytes": 513 * unit}
        made = row(2, step_seconds=None)
        text = as_text(estimate(replace(made, memory=replace(made.memory, **held, **sizes))))
        assert "MiB per GPU" in text and "GiB per GPU" not in text and "device (low-high)" in text
        assert "512.00 (256.00-768.00)" in text
        assert text.splitlines()[5].split()[5] == shown


def test_markdown_is_a_table() -> None:
    lines = as_markdown(estimate(row(2))).splitlines()
    assert lines[3].startswith("|") and set(lines[4]) <= set("|-:")
