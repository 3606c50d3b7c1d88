"""--formulas: where the text of an item is a product, it multiplies out to the item's bytes."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
from dsplan.planner.memory import ledger
from dsplan.planner.models.adapting import adapting_of
from dsplan.planner.models.load import Subject, load_subject
from dsplan.planner.tracing.tracer import trace
from dsplan.schemas.choices import ZeroKnobs, optimizer_named
from dsplan.schemas.layout import Layout
from dsplan.schemas.plan import Plan
from dsplan.schemas.units import count

PRODUCT = re.compile(
    r"(?:(?P<times>\d+) x )?(?P<width>[\d.]+) B x (?P<count>[\d.]+(?: (?:k|M|bn|T)\b)?)(?P<what> params(?! reduced)| elements| gradients)?"
    r"(?: of this rank \(dp \d+\)| gathered)?(?: / dp (?P<dp>\d+))?$"
)
UNITS = {"k": 1e3, "M": 1e6, "bn": 1e9, "T": 1e12}
ROUNDED = 0.005
"""A count has three digits: at most half of the last one off, 0.5 % of 100."""
WITHOUT_NUMBERS = (
    "buffers of the model",
    "inputs and what the loop still holds",
    "at most: forward without saved tensors",
)


@pytest.fixture(scope="module")
def small() -> Subject:
    return load_subject(
        "examples/gpt.py", sets={"layers": "4", "width": "64", "heads": "4", "vocab": "1000", "positions": "64"}
    )


def multiplied(why: str) -> float | None:
    """The product that stands at the end of the text; None: there is none."""
    found = PRODUCT.search(why)
    if found is None:
        return None
    number, _, unit = found["count"].partition(" ")
    return int(found["times"] or 1) * float(found["width"]) * float(number) * UNITS.get(unit, 1) / int(found["dp"] or 1)


@pytest.mark.parametrize(("engine", "zero_stage"), list(itertools.product(("native", "deepspeed"), range(4))))
def test_products_give_the_items_bytes(small: Subject, engine: str, zero_stage: int) -> None:
    products = 0
    for (tp, pp), offload, precision, name in itertools.product(
        ((1, 1), (2, 1), (1, 2)),
        ("none", "optimizer", "param"),
        ("bf16", "fp32"),
        ("adamw", "sgd-momentum", "adafactor", "adamw-8bit"),
    ):
        if (
            (pp > 1 and zero_stage > 1)
            or (offload == "param" and zero_stage < 3)
            or (offload != "none" and not zero_stage)
        ):
            continue
        traced = trace(small, precision=precision, recompute="none", micro_batch=2, seq_len=64)
        optimizer = optimizer_named(name)
        assert optimizer is not None
        plan = Plan(
            engine=engine,  # type: ignore[arg-type]
            layout=Layout(dp_shard=4, tp=tp, pp=pp),
            zero_stage=zero_stage,
            precision=precision,
            micro_batch=2,
            accumulation=2,
            seq_len=64,
            offload=offload,  # type: ignore[arg-type]
            optimizer=replace(optimizer, kernel="foreach"),
            knobs=ZeroKnobs(
                gather_16bit_weights_on_save=True, param_persistence_threshold=100, reduce_bucket_size=10_000
            ),
        )
        for moment in ledger(traced, plan).moments:
            for item in moment.items:
                said = multiplied(item.why)
                if said is None:
                    assert re.search(r"\d", item.why) or item.why in WITHOUT_NUMBERS, item
                    continue
                products += 1
                # beside the rounding: a counter of 4 bytes per tensor, and padding of the last shard
                assert said == pytest.approx(item.bytes, rel=ROUNDED, abs=300), (plan, item)
    assert products > 100


@pytest.mark.parametrize(("quantize", "stored"), [("nf4", 0.5), ("int8", 1)])
def test_products_of_quantized_weights(quantize: str, stored: float) -> None:
    """Without the quantized weights' elements, which have products of their own at the bytes that one takes."""
    model = load_subject("tests/oracle/llama.json", seq_len=32, adapting=adapting_of(lora="r=4", quantize=quantize))
    traced = trace(model, precision="bf16", recompute="none", micro_batch=2, seq_len=32)
    quantized = sum(param.numel for param in traced.all_params if param.stored_bytes is not None)
    for zero_stage, dp in itertools.product((2, 3), (1, 2)):
        plan = Plan(
            engine="native",
            layout=Layout(dp_shard=dp),
            zero_stage=zero_stage,
            precision="bf16",
            micro_batch=2,
            accumulation=1,
            seq_len=32,
        )
        book = ledger(traced, plan)
        for moment in book.moments:
            for item in moment.items:
                said = multiplied(item.why)
                assert said is None or said == pytest.approx(item.bytes, rel=ROUNDED, abs=300), item
            if moment.phase not in ("forward", "backward"):
                continue
            masters = {item.why.split(":")[0]: item.bytes for item in moment.items if item.category == "params"}
            assert masters["fp32 master"] == 4 * (traced.params - quantized) / dp
            assert masters["no master, as stored"] == stored * quantized / dp
            whole = {item.why for item in moment.items if item.category == "gathered_params" and "gathered" in item.why}
            if zero_stage == 2 and moment.phase == "forward":  # all is whole when the last block has run
                assert f"as stored: {stored:g} B x {count(quantized)} params gathered" in whole
                assert f"2 B x {count(traced.params - quantized)} params gathered" in whole


def test_products_are_found() -> None:
    assert multiplied("fp32 master: 4 B x 124 M params / dp 8") == 62e6
    assert multiplied("adamw: 2 x 4 B x 1 bn elements of this rank (dp 8)") == 8e9
    assert multiplied("2 B x 39.4 M params gathered") == 78.8e6
    assert multiplied("no master, as stored: 0.5 B x 6.98 bn params / dp 2") == pytest.approx(1.745e9)
    assert multiplied("traced 880 MiB") is None
