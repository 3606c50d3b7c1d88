"""Companion files, told apart by their keys."""

from pathlib import Path

import pytest
from dsplan.schemas.companion import Companion, read_companion
from dsplan.schemas.problem import Problem

TRAINER = (
    '{"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8, "bf16": true, "optim": "adamw_torch_fused"}'
)
ACCELERATE = """
distributed_type: DEEPSPEED
mixed_precision: fp16
deepspeed_config:
  gradient_accumulation_steps: 2
  zero_stage: 3
  offload_param_device: cpu
"""
AXOLOTL = "base_model: x/y\nmicro_batch_size: 2\nsequence_len: 4096\nbf16: auto\ngradient_checkpointing: true\n"
FACTORY = "finetuning_type: full\nper_device_train_batch_size: 1\ncutoff_len: 2048\nfp16: true\n"


@pytest.mark.parametrize(
    ("name", "text", "kind", "values"),
    [
        (
            "a.json",
            TRAINER,
            "trainer",
            {"micro_batch": 4, "accumulation": 8, "precision": "bf16", "optimizer": "adamw"},
        ),
        (
            "a.yaml",
            ACCELERATE,
            "accelerate",
            {"accumulation": 2, "precision": "fp16", "zero_stage": 3, "offload": "param"},
        ),
        ("a.yml", AXOLOTL, "axolotl", {"micro_batch": 2, "seq_len": 4096, "precision": "bf16", "recompute": "full"}),
        ("a.yaml", FACTORY, "llama-factory", {"micro_batch": 1, "seq_len": 2048, "precision": "fp16"}),
    ],
)
def test_kinds(tmp_path: Path, name: str, text: str, kind: str, values: dict[str, object]) -> None:
    path = tmp_path / name
    path.write_text(text)
    companion = read_companion(str(path))
    assert companion.kind == kind
    assert {key: getattr(companion, key) for key in values} == values


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", "{"),
        ("a.yaml", "a: [1"),
        ("a.yaml", "- 1"),
        ("a.yaml", "colour: red"),
        ("a.yaml", ""),
        ("a.json", '{"per_device_train_batch_size": "4"}'),
        ("a.json", '{"learning_rate": 1, "bf16": ["a"]}'),
        ("a.json", "[" * 20000),
        ("a.yaml", "[" * 3000),
        ("a.yaml", "a: \0b"),
        ("a.yaml", "deepspeed_config: [1]"),
        ("a.yaml", "distributed_type: DEEPSPEED\nmixed_precision: 3"),
    ],
)
def test_what_is_no_companion_names_the_file(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(Problem, match=name) as problem:
        read_companion(str(path))
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("per_device_train_batch_size: a\n", "per_device_train_batch_size is 'a'"),
        ("base_model: m\nmicro_batch_size: 1.5\n", "micro_batch_size is 1.5"),
        ("finetuning_type: full\ncutoff_len: -1\n", "cutoff_len is -1"),
        ("distributed_type: NO\nnum_processes: '8'\n", "num_processes is '8'"),
        ("deepspeed_config: {offload_param_device: [1]}\n", r"offload_param_device is \[1\]"),
        ("learning_rate: 1\nmax_grad_norm: x\n", "max_grad_norm is 'x'"),
    ],
)
def test_a_wrong_value_bears_the_name_that_the_file_has(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(Problem, match=said):
        companion(text, tmp_path)


def test_accelerate_s_numbers_may_be_texts(tmp_path: Path) -> None:
    """It hands them over as environment variables."""
    told = companion("deepspeed_config: {zero_stage: '3', gradient_accumulation_steps: '4'}\n", tmp_path)
    assert (told.zero_stage, told.accumulation) == (3, 4)


def companion(text: str, tmp_path: Path) -> Companion:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    return read_companion(str(path))


def test_all_that_the_trainer_compares_is_read(tmp_path: Path) -> None:
    """YAML 1.1 takes 5e-5 for a text; it is a number all the same."""
    told = companion(
        "per_device_train_batch_size: 2\nlearning_rate: 5e-5\nadam_beta1: 0.9\nadam_beta2: 0.95\nadam_epsilon: 1.0e-6\n"
        "weight_decay: 0.1\nwarmup_steps: 100\nmax_steps: 1000\nmax_grad_norm: 0.5\nlr_scheduler_type: cosine\n"
        "optim: adamw_bnb_8bit\nauto_find_batch_size: true\ndeepspeed: ds.json\n",
        tmp_path,
    )
    assert (told.learning_rate, told.adam_beta1, told.adam_beta2, told.adam_epsilon) == (5e-5, 0.9, 0.95, 1e-6)
    assert (told.weight_decay, told.warmup_steps, told.max_steps, told.gradient_clipping) == (0.1, 100, 1000, 0.5)
    assert (told.optim, told.optimizer, told.lr_scheduler) == ("adamw_bnb_8bit", "adamw-8bit", "cosine")
    assert (told.finds_batch, told.config_file) == (True, "ds.json")


@pytest.mark.parametrize(
    ("text", "steps", "ratio", "total"),
    [
        ("learning_rate: 1.0\nwarmup_steps: 0.1\n", None, 0.1, None),
        ("learning_rate: 1.0\nwarmup_steps: 5e-2\n", None, 0.05, None),
        ("learning_rate: 1.0\nwarmup_ratio: 0.03\nmax_steps: -1\n", None, 0.03, None),
        ("learning_rate: 1.0\nwarmup_steps: 10\nmax_steps: 50\n", 10, None, 50),
    ],
)
def test_a_warm_up_below_1_is_a_share(
    tmp_path: Path, text: str, steps: int | None, ratio: float | None, total: int | None
) -> None:
    told = companion(text, tmp_path)
    assert (told.warmup_steps, told.warmup_ratio, told.max_steps) == (steps, ratio, total)


def test_all_that_accelerate_fills_is_read(tmp_path: Path) -> None:
    told = companion(
        "distributed_type: DEEPSPEED\nmixed_precision: no\nnum_processes: 8\ndeepspeed_config:\n  zero_stage: 3\n"
        "  gradient_clipping: auto\n  gradient_accumulation_steps: auto\n  offload_optimizer_device: nvme\n"
        "  offload_optimizer_nvme_path: /n\n  offload_param_device: none\n  zero3_save_16bit_model: true\n",
        tmp_path,
    )
    assert (told.mixed_precision, told.precision, told.processes, told.zero_stage) == ("no", "fp32", 8, 3)
    assert (told.gradient_clipping, told.accumulation) == (None, None)
    assert (told.optimizer_device, told.optimizer_nvme_path, told.param_device) == ("nvme", "/n", "none")
    assert (told.offload, told.gather_16bit, told.beside_config_file) == ("optimizer", True, ())


@pytest.mark.parametrize(
    "text", ["learning_rate: fast\n", "learning_rate: -1\n", "learning_rate: 1.0\noptim: 3\n", "max_steps: 1.5\nlearning_rate: 1\n"]
)  # fmt: skip
def test_a_wrong_value_is_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(Problem, match="but must be"):
        companion(text, tmp_path)


def test_a_missing_file_names_itself(tmp_path: Path) -> None:
    with pytest.raises(Problem, match="none.yaml: cannot be read"):
        read_companion(str(tmp_path / "none.yaml"))
