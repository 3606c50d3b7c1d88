"""Values and keys that one reader takes and another does not, or takes for something else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from dsplan.planner.auditing.linting import lint_text
from dsplan.schemas.cluster import parse_cluster
from dsplan.schemas.companion import companion_of

BATCH = {"train_batch_size": 8, "gradient_clipping": 1.0}


def said(config: dict[str, Any], reader: str = "deepspeed", ranks: str | None = None) -> dict[str, str]:
    """Rule to severity."""
    cluster = parse_cluster(ranks) if ranks else None
    found = lint_text(json.dumps({**BATCH, **config}), reader=reader, cluster=cluster).findings
    return {finding.rule: finding.severity for finding in found}


@pytest.mark.parametrize("reader", ["trainer", "accelerate"])
def test_behind_a_byte_order_mark_the_rest_is_linted_for_hf_too(reader: str) -> None:
    text = '\ufeff{"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 4}}'
    found = {finding.rule: finding for finding in lint_text(text, reader=reader).findings}
    assert (found["DSP015"].severity, found["DSP015"].raises) == ("warning", "load")
    assert found["DSP004"].severity == "error"
    assert found["DSP004"].span.column == text.index("4}}")  # 1-based, the mark has no column


def test_accelerate_stops_at_the_mark_before_it_misses_a_block() -> None:
    found = lint_text('\ufeff{"train_batch_size": 8}', reader="accelerate").findings
    assert {finding.severity for finding in found if finding.rule != "DSP202"} == {"warning"}


def test_two_byte_order_marks_are_no_json() -> None:
    assert [finding.rule for finding in lint_text("\ufeff\ufeff{}", reader="trainer").findings] == ["DSP000"]


def test_a_text_for_a_switch_fails_where_the_trainer_compares_it() -> None:
    config = {"bf16": {"enabled": "true"}}
    assert said(config)["DSP042"] == "info"
    assert said(config, "trainer")["DSP042"] == "error"
    assert "DSP042" not in said({"bf16": {"enabled": True}}, "trainer")


@pytest.mark.parametrize(
    ("power", "zero_stage", "severity"),
    [
        (16, 0, None), (24, 2, None), (32, 0, "warning"), (63, 2, "warning"),
        (64, 1, "error"), (64, 3, "error"), (64, 0, "warning"), (1024, 0, "error"),
    ],
)  # fmt: skip
def test_powers_that_overflow_as_deepspeed_was_seen_to(power: int, zero_stage: int, severity: str | None) -> None:
    config = {"fp16": {"enabled": True, "initial_scale_power": power}, "zero_optimization": {"stage": zero_stage}}
    assert said(config).get("DSP215") == severity


@pytest.mark.parametrize(
    ("zero", "fits"),
    [
        ({"stage": 2, "reduce_bucket_size": 2.2e10}, True),  # 44 GB of bf16 in the 80 GB of the card
        ({"stage": 2, "reduce_bucket_size": 2.2e10, "overlap_comm": True}, False),  # twice
        ({"stage": 3, "reduce_bucket_size": 2.2e10}, True),  # once, though overlap_comm is on by itself
        ({"stage": 2, "reduce_bucket_size": 2.2e10, "overlap_comm": True, "contiguous_gradients": False}, True),
        ({"stage": 0, "reduce_bucket_size": 2e11}, True),  # no bucket at all
    ],
)
def test_a_reduce_bucket_is_measured_against_the_gpu(zero: dict[str, Any], fits: bool) -> None:
    config = {"bf16": {"enabled": True}, "zero_optimization": zero}
    assert ("DSP331" not in said(config, ranks="8xA100-80GB")) == fits
    assert "DSP331" not in said(config, ranks="8")  # of unknown kind


def test_a_warmup_type_that_is_replaced_is_an_error_where_the_file_alone_says_it() -> None:
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_type": "cosine"}}
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "scheduler": schedule}
    assert (said(config)["DSP004"], said(config, "trainer")["DSP004"]) == ("error", "warning")


@pytest.mark.parametrize(("flag", "zero_stage"), [(True, 1), (False, 0)])
def test_the_old_form_of_zero_optimization_is_told_and_mended(flag: bool, zero_stage: int) -> None:
    found = lint_text(json.dumps({**BATCH, "zero_optimization": flag})).findings
    (told,) = [finding for finding in found if finding.rule == "DSP011"]
    assert told.remedy == f'write {{"stage": {zero_stage}}}'
    assert told.fix is not None and told.fix.safe


def test_dropped_autos_are_told_with_what_holds_instead() -> None:
    found = lint_text('{"train_batch_size": 8, "zero_optimization": {"stage": "auto"}}', reader="deepspeed").findings
    (told,) = [finding for finding in found if finding.rule == "DSP007"]
    assert "takes 0: zero_stage is 0, and ZeRO is off" in told.message


def test_unknown_keys_are_told_one_by_one_up_to_a_number_and_then_counted() -> None:
    text = json.dumps({**BATCH, **{f"key{index}": 1 for index in range(1_003)}})
    told = [finding for finding in lint_text(text, reader="deepspeed").findings if finding.rule == "DSP001"]
    assert len(told) == 1_001
    assert (told[-1].pointer, told[-1].message) == ("/key1000", "3 more unknown keys from here on")


@pytest.mark.parametrize("key", ["stage", "reduce_bucket_size", "sub_group_size"])
@pytest.mark.parametrize("value", [10**400, -(10**400), 1e308], ids=["huge", "low", "float"])
def test_numbers_beyond_every_type_are_findings(key: str, value: float) -> None:
    assert said({"zero_optimization": {"stage": 2, key: value}}, ranks="8xA100-40GB")


@pytest.mark.parametrize(("block", "expected"), [(None, True), ({"device": "auto"}, False), ({"device": "cpu"}, False)])
def test_an_offload_that_accelerate_names_and_the_file_lacks_is_told(block: object, expected: bool) -> None:
    companion = companion_of({"deepspeed_config": {"offload_optimizer_device": "cpu"}}, "acc.yaml")
    zero = {"stage": 2} | ({"offload_optimizer": block} if block else {})
    found = lint_text(json.dumps({**BATCH, "zero_optimization": zero}), companion=companion).findings
    assert any(finding.rule == "DSP027" and "nothing is offloaded" in finding.message for finding in found) is expected


@pytest.mark.parametrize(("reader", "expected"), [("trainer", True), ("accelerate", True), ("deepspeed", False)])
def test_accumulation_is_derived_by_deepspeed_alone(reader: str, expected: bool) -> None:
    text = '{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0}'
    found = lint_text(text, reader=reader, cluster=parse_cluster("4")).findings
    assert ("DSP108" in {finding.rule for finding in found}) is expected
    assert "DSP108" not in {
        finding.rule for finding in lint_text(text, reader=reader, cluster=parse_cluster("16")).findings
    }


# What DeepSpeed 0.19.8 did with each of these, when an engine was built from it and stepped once.
TAKEN = (
    {"gradient_accumulation_steps": True},
    {"gradient_clipping": True},
    {"gradient_clipping": False},
    {"steps_per_print": True},
    {"steps_per_print": 10.5},
    {"zero_optimization": {"stage": 0, "legacy_stage1": True}},
)
RAISED = (
    ({"gradient_accumulation_steps": False}, "parse"),
    ({"steps_per_print": False}, "step"),
    ({"steps_per_print": "10"}, "step"),
    ({"zero_optimization": {"stage": 1, "legacy_stage1": True}}, "init"),
)


@pytest.mark.parametrize("config", TAKEN, ids=json.dumps)
def test_what_the_engine_takes_for_something_else_is_a_warning(config: dict[str, Any]) -> None:
    found = lint_text(json.dumps({**BATCH, **config}), reader="deepspeed").findings
    assert {finding.severity for finding in found} - {"info"} == {"warning"}
    assert all(finding.raises is None for finding in found)


@pytest.mark.parametrize(("config", "moment"), RAISED, ids=str)
def test_what_the_engine_fails_on_is_an_error_of_that_moment(config: dict[str, Any], moment: str) -> None:
    found = lint_text(json.dumps({**BATCH, **config}), reader="deepspeed").findings
    assert [finding.raises for finding in found if finding.severity == "error"] == [moment]


def test_a_scheduler_type_of_null_raises_nowhere() -> None:
    """The engine started and stepped without a schedule."""
    config = {**BATCH, "scheduler": {"type": None}}
    found = lint_text(json.dumps(config), reader="deepspeed").findings
    assert [f.raises for f in found if f.pointer == "/scheduler/type" and f.severity == "error"] == [None]


@pytest.mark.parametrize(
    ("zero", "rule", "severity"),
    [({"stage": "auto"}, "DSP007", "warning"), (True, "DSP011", "error"), (False, "DSP011", "error")],
)
def test_what_the_trainer_hands_to_accelerate(zero: Any, rule: str, severity: str) -> None:
    """transformers 5.24 with accelerate 1.15: stage "auto" became 2, true raised an AttributeError."""
    found = lint_text(json.dumps({**BATCH, "zero_optimization": zero}), reader="trainer").findings
    assert [(finding.rule, finding.severity) for finding in found if finding.severity != "info"] == [(rule, severity)]


@pytest.mark.parametrize("reader", ["trainer", "accelerate"])
@pytest.mark.parametrize("value", ["auto", "100", 0])
def test_steps_per_print_is_overwritten_by_accelerate(reader: Any, value: Any) -> None:
    config = {**BATCH, "zero_optimization": {"stage": 2}, "steps_per_print": value}
    found = lint_text(json.dumps(config), reader=reader).findings
    assert [f.severity for f in found if f.pointer == "/steps_per_print"] == ["warning"]


def test_common_words_are_unknown_and_not_misplaced() -> None:
    text = json.dumps({**BATCH, "seed": 42, "autotuning": {"enabled": False, "mode": "run"}})
    found = lint_text(text, reader="deepspeed").findings
    assert {(f.rule, f.severity) for f in found if f.pointer in ("/seed", "/autotuning/mode")} == {
        ("DSP001", "warning")
    }
