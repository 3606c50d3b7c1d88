"""Companion files, told apart by their keys."""

from pathlib import Path

import pytest
from dsplan.schemas.companion import read_companion
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
    ],
)
def test_what_is_no_companion_names_the_file(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(Problem, match=name):
        read_companion(str(path))


def test_a_missing_file_names_itself(tmp_path: Path) -> None:
    with pytest.raises(Problem, match="none.yaml: cannot be read"):
        read_companion(str(tmp_path / "none.yaml"))
