"""Check: all that a launch line will read, linted together."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import Done, dsplan

PLAIN = '{"train_batch_size": 64, "gradient_clipping": 1.0, "bf16": {"enabled": true}}'
AUTO = """{
  "train_batch_size": "auto",
  "train_micro_batch_size_per_gpu": "auto",
  "gradient_accumulation_steps": 2,
  "gradient_clipping": "auto",
  "zero_optimization": {"stage": 2}
}"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working folder, with two configurations, and no launcher's environment."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith(("SLURM_", "PET_", "CUDA_", "HF_")) or name == "WORLD_SIZE":
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "plain.json").write_text(PLAIN)
    (tmp_path / "auto.json").write_text(AUTO)
    yield tmp_path


def check(line: str) -> Done:
    return dsplan("check", "--format", "json", "--", *line.split())


def rules(done: Done, severity: str = "error") -> list[str]:
    return [
        finding["rule"]
        for file in json.loads(done.out)["files"]
        for finding in file["findings"]
        if finding["severity"] == severity
    ]


@pytest.mark.parametrize(
    ("line", "code", "expected"),
    [
        ("torchrun --nproc_per_node 8 --nnodes 2 train.py --deepspeed_config plain.json", 0, []),
        ("torchrun --nproc_per_node 3 train.py --deepspeed_config plain.json", 1, ["DSP102"]),
        ("deepspeed --num_gpus 3 train.py --deepspeed --deepspeed_config=plain.json", 1, ["DSP102"]),
        ("srun -N 3 --ntasks-per-node 1 python train.py --ds_config plain.json", 1, ["DSP102"]),
        ("python train.py --deepspeed auto.json --output_dir o --max_grad_norm 0.5", 1, ["DSP102", "DSP020"]),
        (
            "torchrun train.py --deepspeed auto.json --output_dir o --bf16 --gradient_accumulation_steps 2",
            0,
            [],
        ),
        (
            "torchrun train.py --deepspeed auto.json --output_dir=o --max_grad_norm=0.5 --gradient_accumulation_steps=2",
            0,
            [],
        ),
    ],
)
def test_findings(folder: Path, line: str, code: int, expected: list[str]) -> None:
    done = check(line)
    assert done.code == code, done.err
    assert rules(done) == expected


def test_a_bare_deepspeed_flag_means_that_deepspeed_reads(folder: Path) -> None:
    assert "DSP007" in rules(check("deepspeed --num_gpus 2 train.py --deepspeed --deepspeed_config auto.json"))
    assert "DSP007" not in rules(check("deepspeed --num_gpus 2 train.py --deepspeed auto.json"))


def test_it_says_what_it_took_from_where(folder: Path) -> None:
    done = check("torchrun --nproc_per_node 8 --nnodes 2 train.py --deepspeed_config plain.json")
    assert "configuration plain.json: --deepspeed_config" in done.err
    assert "16 GPUs: --nnodes 2 x --nproc_per_node 8" in done.err


def test_files_of_arguments_are_read(folder: Path) -> None:
    (folder / "train.yaml").write_text(
        "model_name_or_path: m\nfinetuning_type: full\ndeepspeed: auto.json\ngradient_accumulation_steps: 4\n"
    )
    done = check("llamafactory-cli train train.yaml")
    assert rules(done) == ["DSP020"]
    assert "configuration auto.json: deepspeed in train.yaml" in done.err
    assert rules(check("llamafactory-cli train train.yaml gradient_accumulation_steps=2")) == []


def test_a_flag_with_its_file_is_no_file_of_arguments(folder: Path) -> None:
    assert rules(check("deepspeed --num_gpus 3 train.py --deepspeed_config=plain.json")) == ["DSP102"]
    (folder / "train.yaml").write_text(
        "output_dir: o\nlearning_rate: 1.0e-4\ngradient_accumulation_steps: 4\ndeepspeed: auto.json\n"
    )
    assert "DSP020" in rules(check("python train.py --config=train.yaml"))


def test_a_number_that_is_not_set_is_not_taken_from_elsewhere(folder: Path) -> None:
    (folder / "acc.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 3\n")
    line = "accelerate launch --config_file acc.yaml --num_processes $UNSET train.py --deepspeed_config plain.json"
    done = dsplan("check", "--format", "json", "--", line)
    assert "DSP102" not in rules(done)
    assert "not known (--num_processes $UNSET is no number)" in done.err
    unset = dsplan("check", "--", "torchrun train.py --deepspeed $UNSET")
    assert (unset.code, unset.err) == (
        2,
        "dsplan: error: --deepspeed is $UNSET, which is not set here; set it, or write the file\n",
    )


def test_a_configuration_inside_a_yaml_is_read(folder: Path) -> None:
    (folder / "train.yaml").write_text(
        "output_dir: o\nlearning_rate: 1.0e-4\ndeepspeed:\n  zero_optimization: {stage: 2}\n"
        "  gradient_clipping: 2.0\n  train_batch_size: auto\n"
    )
    assert rules(check("python train.py train.yaml")) == ["DSP023"]


def test_axolotl(folder: Path) -> None:
    (folder / "x.yml").write_text(
        "base_model: m\nmicro_batch_size: 2\ngradient_accumulation_steps: 8\ndeepspeed: auto.json\n"
    )
    assert rules(check("axolotl train x.yml")) == ["DSP020"]


ACCELERATE = "distributed_type: DEEPSPEED\nnum_processes: 3\ndeepspeed_config:\n  deepspeed_config_file: plain0.json\n"


def test_accelerate(folder: Path) -> None:
    config = {**json.loads(PLAIN), "zero_optimization": {"stage": 2}}
    (folder / "plain0.json").write_text(json.dumps(config))
    (folder / "acc.yaml").write_text(ACCELERATE)
    done = check("accelerate launch --config_file acc.yaml train.py")
    assert rules(done) == ["DSP102"]
    assert "3 GPUs: num_processes 3 of acc.yaml" in done.err
    assert rules(check("accelerate launch --config_file acc.yaml --num_processes 4 train.py")) == []
    (folder / "acc.yaml").write_text(ACCELERATE + "  zero_stage: 3\n")
    assert rules(check("accelerate launch --config_file acc.yaml --num_processes 4 train.py")) == ["DSP026"]


def test_the_trainer_under_accelerate(folder: Path) -> None:
    """The Trainer fills betas, which Accelerate by itself cannot; Accelerate still refuses its own file."""
    config = {
        **json.loads(AUTO),
        "gradient_accumulation_steps": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
    }
    (folder / "plain0.json").write_text(json.dumps(config))
    (folder / "acc.yaml").write_text(ACCELERATE)
    assert rules(check("accelerate launch --config_file acc.yaml train.py")) == ["DSP030"]
    trainer = "--output_dir o --per_device_train_batch_size 2"
    assert rules(check(f"accelerate launch --config_file acc.yaml train.py {trainer}")) == []
    (folder / "acc.yaml").write_text(ACCELERATE + "  gradient_clipping: 1.0\n")
    assert rules(check(f"accelerate launch --config_file acc.yaml train.py {trainer}")) == ["DSP026"]


def test_what_the_project_ignores_is_not_told(folder: Path) -> None:
    line = "torchrun --nproc_per_node 3 train.py --deepspeed_config plain.json"
    (folder / "pyproject.toml").write_text('[tool.dsplan]\nignore = ["DSP102"]\n')
    assert rules(check(line)) == []


def test_accelerate_s_own_fields_are_a_configuration(folder: Path) -> None:
    done = check("accelerate launch --use_deepspeed --zero_stage 3 --num_processes 2 train.py")
    assert (done.code, rules(done)) == (0, [])
    assert "built by Accelerate" in done.err


def test_what_the_script_hands_over_is_found(folder: Path) -> None:
    (folder / "train.py").write_text(
        "import deepspeed\nCONFIG = {'train_batch_size': 8, 'gradient_cliping': 1.0}\n"
        "deepspeed.initialize(model=None, config=CONFIG)\n"
    )
    done = check("torchrun train.py")
    assert rules(done) == ["DSP001"]
    (folder / "train.py").write_text("import deepspeed\ndeepspeed.initialize(model=None, config='plain.json')\n")
    assert rules(check("torchrun --nproc_per_node 3 train.py")) == ["DSP102"]


def test_an_unknown_number_of_gpus_can_be_given(folder: Path) -> None:
    line = "torchrun --nproc_per_node gpu train.py --deepspeed_config plain.json"
    done = check(line)
    assert "number of GPUs: not known" in done.err
    assert (done.code, rules(done)) == (0, [])
    assert dsplan("check", "--world-size", "3", "--", *line.split()).code == 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("python train.py", "names no DeepSpeed configuration"),
        ("python nothere.py", "in nothere.py, which is not there"),
        ("torchrun --nproc_per_node 0 train.py --deepspeed auto.json", "starts no process"),
        ("mpirun -np 0 python train.py --deepspeed auto.json", "starts no process"),
        ("python train.py --deepspeed missing.json", "missing.json"),
        ("frobnicate train.py", "is no launcher"),
        ("llamafactory-cli train missing.yaml", "missing.yaml"),
        (
            "torchrun train.py --deepspeed auto.json --output_dir o --per_device_train_batch_size four",
            "per_device_train_batch_size is",
        ),
    ],
)
def test_what_cannot_be_checked_is_one_line_and_2(folder: Path, line: str, said: str) -> None:
    done = check(line)
    assert done.code == 2
    assert said in done.err.splitlines()[-1]
    assert "Traceback" not in done.err


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dsplan.planner.cli", "check", "--exec", "--", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)


def test_exec_runs_a_clean_line_in_its_place(folder: Path) -> None:
    (folder / "hello.py").write_text("import os, sys\nprint(os.environ['A'], *sys.argv[1:])\nsys.exit(7)\n")
    done = run(folder, "A=b", sys.executable, "hello.py", "--deepspeed_config", "plain.json")
    assert (done.returncode, done.stdout) == (7, "b --deepspeed_config plain.json\n")


def test_exec_runs_the_redirections_of_a_quoted_line(folder: Path) -> None:
    (folder / "hello.py").write_text("print('ran')\nraise SystemExit(5)\n")
    done = run(folder, f"{sys.executable} hello.py --deepspeed_config plain.json > log")
    assert (done.returncode, done.stdout, (folder / "log").read_text()) == (5, "", "ran\n")


def test_exec_does_not_run_a_line_with_errors(folder: Path) -> None:
    (folder / "hello.py").write_text("print('ran')\n")
    (folder / "bad.json").write_text('{"train_batch_size": 8, "fp16": true}')
    done = run(folder, sys.executable, "hello.py", "--deepspeed_config", "bad.json")
    assert (done.returncode, done.stdout) == (1, "")
    assert "DSP008" in done.stderr


def test_nothing_heavy_is_loaded(folder: Path) -> None:
    code = (
        "import sys\nfrom dsplan.planner.auditing import checking, comparing, resolving\n"
        "from dsplan.planner.auditing.launch_lines import read_line\n"
        "line = read_line('torchrun train.py --deepspeed_config plain.json'.split(), {})\n"
        "checking.check(checking.setup_of(line, {}))\ncomparing.compare(resolving.resolve('plain.json'), "
        "resolving.resolve('plain.json'))\nprint(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not {"torch", "numpy", "yaml", "jsonschema", "transformers"} & set(done.stdout.split())


def test_one_flag_is_enough_where_the_script_speaks_of_training_arguments(folder: Path) -> None:
    line = "torchrun --nproc_per_node 4 train.py --deepspeed=auto.json --gradient_accumulation_steps 8"
    (folder / "train.py").write_text("import argparse\n")
    assert json.loads(check(line).out)["files"][0]["read_as"] == "trainer"  # by its "auto" values
    assert rules(check(line)) == []
    (folder / "train.py").write_text("from transformers import HfArgumentParser, TrainingArguments\n")
    assert "DSP020" in rules(check(line))  # accumulation 2 in the file


def test_a_script_that_hands_over_another_configuration_is_named(folder: Path) -> None:
    (folder / "train.py").write_text("ds = {'train_batch_size': 8}\ndeepspeed.initialize(model=m, config=ds)\n")
    done = check("torchrun --nproc_per_node 4 train.py --deepspeed_config plain.json")
    assert "train.py hands over train.py#ds too, so lint that as well" in done.err
