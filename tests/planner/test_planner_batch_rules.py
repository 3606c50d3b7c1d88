"""The batch equation as DeepSpeed 0.19.8 solves and checks it, and what lint says instead of its assertions."""

from __future__ import annotations

import json
from typing import Any

import pytest
from dsplan.planner.auditing.linting import lint_text
from dsplan.schemas.cluster import parse_cluster
from dsplan.schemas.finding import Finding

TOTAL, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def found(config: dict[str, Any], ranks: str | None = None) -> list[Finding]:
    """Errors of the batch family."""
    cluster = parse_cluster(ranks) if ranks else None
    findings = lint_text(json.dumps(config), cluster=cluster, reader="deepspeed").findings
    return [finding for finding in findings if finding.rule.startswith("DSP1") and finding.severity == "error"]


@pytest.mark.parametrize(
    ("config", "ranks", "remedy"),
    [
        ({TOTAL: 64, MICRO: 8, STEPS: 4}, "1", "run on 2 GPUs"),
        ({TOTAL: 48, MICRO: 1, STEPS: 4}, "8", "run on 12 GPUs"),
        ({TOTAL: 30}, "8", "run on 3, 5, 6 or 10 GPUs"),
        ({TOTAL: 12, MICRO: 4}, "2", "run on 1 or 3 GPUs"),
        ({TOTAL: 48, MICRO: 2, STEPS: 3, "sequence_parallel_size": 2}, "8", "run on 16 GPUs"),
        ({TOTAL: 8, MICRO: 1, STEPS: 4, "dsplan": {"pipeline_stages": 4}}, "4", "run on 8 GPUs"),
    ],
)
def test_the_numbers_of_gpus_that_would_fit_are_named(config: dict[str, Any], ranks: str, remedy: str) -> None:
    assert [remedy in finding.remedy for finding in found(config, ranks)] == [True]


@pytest.mark.parametrize(
    ("config", "ranks", "said"),
    [
        ({TOTAL: 2}, "4", "needs at least 4: the micro-batch of a GPU would be 0"),
        ({TOTAL: 4, STEPS: 2}, "4", "needs at least 8: the micro-batch of a GPU would be 0"),
        ({TOTAL: 4, MICRO: 8}, "2", "needs at least 16: the accumulation would be 0"),
    ],
)
def test_what_would_be_derived_as_nothing(config: dict[str, Any], ranks: str, said: str) -> None:
    assert [(finding.rule, finding.raises, said in finding.message) for finding in found(config, ranks)] == [
        ("DSP106", "parse", True)
    ]


@pytest.mark.parametrize(
    ("config", "ranks"),
    [
        ({TOTAL: 8, "sequence_parallel_size": 2}, "4"),
        ({TOTAL: 8, MICRO: 2, STEPS: 2, "sequence_parallel_size": 2}, "4"),
        ({TOTAL: 8, MICRO: 1, STEPS: 8, "dsplan": {"pipeline_stages": 4}}, "4"),
        ({TOTAL: 8, MICRO: 1, STEPS: 2, "dsplan": {"pipeline_stages": 2}, "sequence_parallel_size": 2}, "16"),
        ({TOTAL: 8, MICRO: 1, STEPS: 1, "tensor_parallel": {"autotp_size": 4}}, "8"),  # the parser counts all 8
        ({TOTAL: 64, MICRO: 2, STEPS: 4}, None),  # any number of GPUs may be meant
        ({MICRO: 2, STEPS: 4}, "7"),
    ],
)
def test_what_deepspeed_takes_is_no_error(config: dict[str, Any], ranks: str | None) -> None:
    assert found(config, ranks) == []


def test_the_batch_equation_holds_for_tensor_parallel_only_as_deepspeed_counts_it() -> None:
    config = {TOTAL: 2, MICRO: 1, STEPS: 1, "tensor_parallel": {"autotp_size": 4}}
    assert [finding.rule for finding in found(config, "8")] == ["DSP102"]  # dp 2 would do, and DeepSpeed asks for 8
