"""Diff: what counts as a difference, and what changes the model that is trained."""

import json
from pathlib import Path

import pytest
from command import dsplan
from dsplan.planner.auditing.comparing import compare
from dsplan.planner.auditing.resolving import resolve_pair
from dsplan.schemas.cluster import parse_cluster
from dsplan.schemas.companion import Companion, companion_of
from dsplan.schemas.resolved import Comparison

ADAM = '"optimizer": {"type": "AdamW", "params": {"lr": 0.001}}'


def compared(folder: Path, a: str, b: str, gpus: int | None = None, companion: Companion | None = None) -> Comparison:
    files = [folder / "a.json", folder / "b.json"]
    for file, text in zip(files, (a, b), strict=True):
        file.write_text(text)
    cluster = parse_cluster(str(gpus)) if gpus else None
    first, second = map(str, files)
    return compare(*resolve_pair(first, second, reader="auto", companion=companion, cluster=cluster))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("{T}", "{T}"),
        ("{T, 'gradient_clipping': 1.0}", "{T}"),
        ("{T, 'zero_optimization': {'stage': 1}}", "{T, 'zero_optimization': {'stage': 3, 'offload_param': {'device': 'cpu'}}}"),
        ("{T, 'zero_optimization': {'stage': '2'}}", "{T, 'zero_optimization': {'stage': 2, 'reduce_bucket_size': 7}}"),
        ("{T, ADAM}", "{T, 'optimizer': {'type': 'Adam', 'params': {'lr': 1e-3, 'betas': [0.9, 0.999]}}}"),
        ("{T, 'fp16': {'enabled': false, 'loss_scale': 128}}", "{T}"),
        ("{T, 'gradient_cliping': 9}", "{T}"),
        ("{T, 'steps_per_print': 10, 'wall_clock_breakdown': true}", "{T}"),
        ("{T, 'communication_data_type': 'FP16'}", "{T, 'communication_data_type': 'fp16'}"),
        ("{T, ADAM, 'scheduler': {'type': 'WarmupLR', 'params': {}}}", "{T, ADAM, 'scheduler': {'type': 'WarmupLR', 'params': {'warmup_min_lr': 0, 'warmup_max_lr': 1e-3, 'warmup_num_steps': 1000, 'warmup_type': 'log'}}}"),
        ("{T, 'optimizer': {'type': 'Lamb', 'params': {'lr': 1e-3}}}", "{T, 'optimizer': {'type': 'Lamb', 'params': {'max_coeff': 10, 'betas': [0.9, 0.999]}}}"),
        ("{T, ADAM}", "{T, 'optimizer': {'type': 'AdamW', 'params': {'lr': 1e-3, 'torch_adam': true, 'adam_w_mode': false}}}"),
        ("{T, 'data_efficiency': {'enabled': false, 'seed': 5, 'data_routing': {'enabled': true}}}", "{T}"),
        ("{T, 'sequence_parallel_size': 2}", "{T}"),
    ],
)  # fmt: skip
def test_the_same_model(tmp_path: Path, a: str, b: str) -> None:
    found = compared(tmp_path, *(_text(text) for text in (a, b)))
    assert found.same_model
    assert not [difference for difference in found.differences if difference.decides]
    assert "equal" in found.because[0]


@pytest.mark.parametrize(
    ("a", "b", "because"),
    [
        ("{T}", "{T, 'tensor_parallel': {'autotp_size': 2}}", "a step holds other samples: tensor_parallel.autotp_size is 1 in A and 2 in B"),
        ("{'train_micro_batch_size_per_gpu': 2}", "{'train_micro_batch_size_per_gpu': 2, 'sequence_parallel_size': 2}", "the global batch differs: sequence_parallel_size is 1 in A and 2 in B"),
        ("{T, ADAM, 'scheduler': {'type': 'WarmupDecayLR', 'params': {'total_num_steps': 9}}}", "{T, ADAM, 'scheduler': {'type': 'WarmupDecayLR', 'params': {'total_num_steps': 9, 'warmup_max_lr': 0.01}}}", "scheduler.params.warmup_max_lr is 0.001 in A and 0.01 in B"),
        ("{T, ADAM}", "{T, 'optimizer': {'type': 'Adam', 'params': {'lr': 0.001, 'adam_w_mode': false}}}", "optimizer.params.adam_w_mode is true in A and false in B"),
        ("{T}", "{'train_batch_size': 32}", "the global batch is 64 in A and 32 in B"),
        ("{T, 'bf16': {'enabled': true}}", "{T}", "bf16.enabled is true in A and false in B"),
        ("{T, 'gradient_clipping': 0}", "{T}", "gradient_clipping is 0 in A and 1.0 in B"),
        ("{T, ADAM}", "{T, 'optimizer': {'type': 'SGD', 'params': {'lr': 0.001}}}", 'optimizer.type is "AdamW" in A and "SGD" in B'),
        ("{T, ADAM}", "{T, 'optimizer': {'type': 'AdamW', 'params': {'lr': 0.01}}}", "optimizer.params.lr is 0.001 in A and 0.01 in B"),
        ("{T, ADAM}", "{T}", 'optimizer.type is "AdamW" in A only'),
        (
            "{T, ADAM, 'scheduler': {'type': 'WarmupLR', 'params': {'warmup_num_steps': 10}}}",
            "{T, ADAM, 'scheduler': {'type': 'WarmupLR', 'params': {'warmup_num_steps': 20}}}",
            "scheduler.params.warmup_num_steps is 10 in A and 20 in B",
        ),
        ("{T, 'data_types': {'grad_accum_dtype': 'fp32'}}", "{T}", 'data_types.grad_accum_dtype is "fp32" in A and null in B'),
    ],
)  # fmt: skip
def test_another_model(tmp_path: Path, a: str, b: str, because: str) -> None:
    found = compared(tmp_path, *(_text(text) for text in (a, b)))
    assert not found.same_model
    assert because in found.because


def _text(text: str) -> str:
    return text.replace("'", '"').replace("{T", '{"train_batch_size": 64').replace("ADAM", ADAM)


def test_one_global_batch_split_otherwise_is_the_same_model(tmp_path: Path) -> None:
    a = '{"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}'
    b = '{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}'
    found = compared(tmp_path, a, b)
    assert found.same_model
    assert {difference.pointer for difference in found.differences} == {
        "/train_micro_batch_size_per_gpu",
        "/gradient_accumulation_steps",
    }


def test_a_global_and_a_micro_batch_are_compared_where_the_gpus_are_known(tmp_path: Path) -> None:
    a, b = '{"train_batch_size": 64}', '{"train_micro_batch_size_per_gpu": 8}'
    assert compared(tmp_path, a, b).because == ("the global batch is not known on both sides (give --cluster)",)
    assert compared(tmp_path, a, b, gpus=8).same_model
    assert compared(tmp_path, a, b, gpus=4).because == ("the global batch is 64 in A and 32 in B",)


def test_both_are_read_by_the_reader_that_fills(tmp_path: Path) -> None:
    companion = companion_of({"learning_rate": 1e-3, "per_device_train_batch_size": 8}, "args.yaml", "trainer")
    params = '"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0'
    auto = '{"train_batch_size": "auto", "optimizer": {"type": "AdamW", "params": {"lr": "auto", %s}}}' % params  # noqa: UP031
    plain = '{"train_batch_size": 64, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, %s}}}' % params  # noqa: UP031
    found = compared(tmp_path, auto, plain, gpus=8, companion=companion)
    assert (found.a.read_as, found.b.read_as) == ("trainer", "trainer")
    assert found.same_model
    unfilled = compared(tmp_path, auto, plain, gpus=8)
    assert 'optimizer.params.lr is "auto" (unfilled) in A and 0.001 in B' in unfilled.because


def test_the_command_s_exit_code_is_the_verdict(tmp_path: Path) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    a.write_text('{"train_batch_size": 64}')
    b.write_text('{"train_batch_size": 64, "zero_optimization": {"stage": 3}}')
    same = dsplan("diff", str(a), str(b))
    assert (same.code, same.out.splitlines()[-1].startswith("trains the same model: yes, because")) == (0, True)
    b.write_text('{"train_batch_size": 64, "fp16": {"enabled": true}}')
    other = dsplan("diff", str(a), str(b), "--format", "json")
    assert (other.code, json.loads(other.out)["same_model"]) == (1, False)
    assert dsplan("diff", str(a), str(tmp_path / "none.json")).code == 2


AUTO_MICRO = '{"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": %s}'


@pytest.mark.parametrize(
    ("a", "b", "because"),
    [
        (AUTO_MICRO % 4, AUTO_MICRO % 8, "accumulation is 4 in A and 8 in B, and so the global batch differs"),
        (
            AUTO_MICRO % 4,
            AUTO_MICRO % '"auto"',
            "the global batch is not known on both sides (give --cluster, and --args for auto)",
        ),
        (
            AUTO_MICRO % 4,
            '{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8}',
            "the global batch is not known on both sides (give --cluster, and --args for auto)",
        ),
    ],
)
def test_an_auto_that_nobody_filled_is_equal_to_itself_alone(tmp_path: Path, a: str, b: str, because: str) -> None:
    assert compared(tmp_path, a, b).because == (because,)
    assert compared(tmp_path, a, a).same_model


def test_a_block_that_one_side_lacks_is_one_reason(tmp_path: Path) -> None:
    assert compared(tmp_path, _text("{T, ADAM}"), _text("{T}")).because == ('optimizer.type is "AdamW" in A only',)


def test_standard_input_is_not_two_files() -> None:
    done = dsplan("diff", "-", "-")
    assert (done.code, done.out) == (2, "")
    assert "both files are -" in done.err
