"""What fills "auto", and what a reader refuses, against recorded answers of transformers and Accelerate."""

import json
from pathlib import Path

import pytest
from dsplan.planner.auditing.filling import filled_values
from dsplan.planner.auditing.linting import lint_text
from dsplan.schemas.cluster import parse_cluster
from dsplan.schemas.companion import companion_of
from dsplan.schemas.finding import FileFindings
from dsplan.schemas.jsonfile import read_document, steps

RECORD = json.loads((Path(__file__).parents[1] / "oracle" / "filled_values.json").read_text("utf-8"))
COMPARED = {"DSP020", "DSP021", "DSP022", "DSP023", "DSP024", "DSP025"}
UNKNOWN_STEPS = "/scheduler/params/total_num_steps"
"""The record has 777 steps where max_steps names none: dsplan does not know them."""


def trainer_findings(case: dict) -> FileFindings:
    companion = companion_of({"output_dir": "out", **case["args"]}, "args.yaml", "trainer")
    return lint_text(json.dumps(case["given"]), cluster=parse_cluster(str(case["ranks"])), companion=companion)


@pytest.mark.parametrize("case", RECORD["trainer"], ids=lambda case: json.dumps(case["args"]))
def test_the_trainer_refuses_what_lint_reports(case: dict) -> None:
    refused = ["/" + key.replace(".", "/") for key in case.get("refused", ())]
    found = {finding.pointer for finding in trainer_findings(case).findings if finding.rule in COMPARED}
    assert found == set(refused)


@pytest.mark.parametrize("case", RECORD["trainer"], ids=lambda case: json.dumps(case["args"]))
def test_the_trainer_fills_what_dsplan_fills(case: dict) -> None:
    companion = companion_of({"output_dir": "out", **case["args"]}, "args.yaml", "trainer")
    filled = filled_values(
        companion, ranks=case["ranks"], stage=case["given"].get("zero_optimization", {}).get("stage")
    )
    document = read_document(json.dumps(case["given"]), "json")
    for pointer, value in document.walk():
        if value == "auto" and "config" in case and (pointer != UNKNOWN_STEPS or companion.max_steps):
            held = case["config"]
            for step in steps(pointer):
                held = held[step]
            assert filled[pointer].value == held, pointer


def accelerate_file(case: dict) -> dict:
    return {
        "distributed_type": "DEEPSPEED",
        "mixed_precision": case["mixed_precision"],
        "deepspeed_config": case["args"],
    }


@pytest.mark.parametrize("case", RECORD["accelerate"], ids=lambda case: json.dumps(case["given"]))
def test_accelerate_refuses_what_lint_reports(case: dict) -> None:
    companion = companion_of(accelerate_file(case), "accelerate.yaml")
    found = lint_text(json.dumps({"train_micro_batch_size_per_gpu": 1, **case["given"]}), companion=companion)
    refusing = {finding.rule for finding in found.findings if finding.severity == "error"}
    assert bool(refusing) == ("refused" in case), refusing


@pytest.mark.parametrize("case", RECORD["accelerate"], ids=lambda case: json.dumps(case["given"]))
def test_accelerate_fills_what_dsplan_fills(case: dict) -> None:
    filled = filled_values(companion_of(accelerate_file(case), "accelerate.yaml"))
    for pointer, value in read_document(json.dumps(case["given"]), "json").walk():
        if value == "auto" and pointer in filled:
            held = case["config"]
            for step in steps(pointer):
                held = held[step]
            assert filled[pointer].value == held, pointer


def test_sizes_follow_the_hidden_size() -> None:
    """h*h, int(0.9*h*h), 10*h for h 64; the last two at stage 3 only."""
    companion = companion_of({}, "args.yaml", "trainer")
    third = filled_values(companion, stage=3, hidden_size=64)
    assert third["/zero_optimization/reduce_bucket_size"].value == 4096
    assert third["/zero_optimization/stage3_prefetch_bucket_size"].value == 3686
    assert third["/zero_optimization/stage3_param_persistence_threshold"].value == 640
    assert "/zero_optimization/stage3_prefetch_bucket_size" not in filled_values(companion, stage=2, hidden_size=64)


def test_axolotl_is_compared_by_what_its_file_names() -> None:
    companion = companion_of({"base_model": "x", "micro_batch_size": 2}, "axolotl.yml")
    filled = filled_values(companion)
    assert filled["/train_micro_batch_size_per_gpu"].value == 2
    assert "/optimizer/params/lr" not in filled


def test_a_batch_that_the_trainer_looks_for_is_not_compared() -> None:
    args = {"per_device_train_batch_size": 8, "auto_find_batch_size": True}
    config = {"train_micro_batch_size_per_gpu": 2, "train_batch_size": 2}
    found = trainer_findings({"args": args, "given": config, "ranks": 1})
    assert not {finding.rule for finding in found.findings} & COMPARED


def test_fields_beside_the_config_file_are_named() -> None:
    raw = {
        "mixed_precision": "bf16",
        "deepspeed_config": {"deepspeed_config_file": "ds.json", "zero_stage": 3, "zero3_init_flag": True},
    }
    companion = companion_of(raw, "accelerate.yaml")
    assert companion.beside_config_file == ("zero_stage", "mixed_precision")
    text = '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}'
    found = lint_text(text, companion=companion).findings
    assert [finding.rule for finding in found if finding.severity == "error"] == ["DSP026"]
