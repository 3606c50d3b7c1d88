"""Launch lines: who starts how many ranks of what."""

from pathlib import Path

import pytest
from dsplan.planner.launch_lines import LaunchLine, read_line
from dsplan.schemas.problem import Problem


def read(text: str, **environment: str) -> LaunchLine:
    return read_line(text.split(), environment)


@pytest.mark.parametrize(
    ("text", "ranks", "nodes", "program"),
    [
        ("torchrun train.py", 1, 1, "train.py"),
        ("torchrun --nproc_per_node 8 --nnodes 2 train.py --lr 1", 16, 2, "train.py"),
        ("torchrun --nproc-per-node=4 --nnodes=2:2 train.py", 8, 2, "train.py"),
        ("torchrun --standalone --nproc_per_node=4 train.py", 4, 1, "train.py"),
        ("torchrun --nnodes 1:4 --nproc_per_node 8 train.py", None, 1, "train.py"),
        ("torchrun --nproc_per_node gpu train.py", None, 1, "train.py"),
        ("torchrun --rdzv_backend c10d --rdzv_endpoint h:1 --nproc_per_node 2 -m pkg.train --x 1", 2, 1, "pkg.train"),
        ("python -m torch.distributed.run --nproc_per_node 3 train.py", 3, 1, "train.py"),
        ("python3.11 -u -m torch.distributed.launch --use_env --nproc_per_node=3 train.py", 3, 1, "train.py"),
        ("deepspeed --num_gpus 8 train.py", 8, 1, "train.py"),
        ("deepspeed --num_nodes 2 --num_gpus=4 --master_port 29500 train.py", 8, 2, "train.py"),
        ("deepspeed --include localhost:0,1,2 train.py", 3, 1, "train.py"),
        ("deepspeed -i a:0,1@b:0,1 --no_local_rank train.py", 4, 2, "train.py"),
        ("deepspeed train.py", None, 1, "train.py"),
        ("accelerate launch --num_processes 8 --use_deepspeed train.py", 8, 1, "train.py"),
        ("accelerate launch --num_machines 2 --num_processes 16 -m pkg.train", 16, 2, "pkg.train"),
        ("accelerate launch train.py", None, 1, "train.py"),
        ("python -m accelerate.commands.launch --num_processes=2 train.py", 2, 1, "train.py"),
        ("srun -N 2 --ntasks-per-node 8 python train.py", 16, 2, "train.py"),
        ("srun -N2 -n16 --gres=gpu:8 -u python -u train.py", 16, 2, "train.py"),
        ("srun --nodes=2 --ntasks=2 torchrun --nnodes 2 --nproc_per_node 8 train.py", 16, 2, "train.py"),
        ("mpirun -np 8 -x PATH -mca btl tcp --allow-run-as-root python train.py", 8, 1, "train.py"),
        ("mpiexec -n 8 -ppn 4 python train.py", 8, 2, "train.py"),
        ("python train.py --deepspeed ds.json", 1, 1, "train.py"),
        ("train.py --deepspeed ds.json", 1, 1, "train.py"),
        ("axolotl train x.yml", None, 1, "axolotl"),
        ("axolotl train x.yml --launcher torchrun -- --nproc_per_node=4", 4, 1, "axolotl"),
        ("llamafactory-cli train x.yaml", None, 1, "llamafactory-cli"),
        ("nohup uv run torchrun --nproc_per_node 2 train.py", 2, 1, "train.py"),
        ("env A=1 torchrun --nproc_per_node 2 train.py", 2, 1, "train.py"),
    ],
)
def test_counts_and_program(text: str, ranks: int | None, nodes: int, program: str) -> None:
    line = read(text)
    assert (line.count.ranks, line.count.nodes, line.program) == (ranks, nodes, program)


@pytest.mark.parametrize(
    ("environment", "text", "ranks"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1,2"}, "torchrun --nproc_per_node gpu train.py", 3),
        ({"CUDA_VISIBLE_DEVICES": "4,5"}, "deepspeed train.py", 2),
        ({"PET_NNODES": "2", "PET_NPROC_PER_NODE": "4"}, "torchrun train.py", 8),
        ({"PET_NNODES": "2"}, "torchrun --nnodes 3 --nproc_per_node 4 train.py", 12),
        ({"SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "4"}, "srun python train.py", 8),
        ({"SLURM_NNODES": "2", "SLURM_NTASKS": "6"}, "srun python train.py", 6),
        ({"WORLD_SIZE": "4"}, "python train.py", 4),
        ({"SLURM_NTASKS": "6"}, "python -u train.py", 6),
        ({"WORLD_SIZE": "4"}, "torchrun --nproc_per_node 2 train.py", 2),
        ({"NPROC_PER_NODE": "8", "NNODES": "2"}, "llamafactory-cli train x.yaml", 16),
    ],
)
def test_counts_of_the_environment(environment: dict[str, str], text: str, ranks: int) -> None:
    assert read(text, **environment).count.ranks == ranks


def test_assignments_before_the_line_count() -> None:
    line = read("CUDA_VISIBLE_DEVICES=0,1 A=b torchrun --nproc_per_node gpu train.py --x")
    assert line.count.ranks == 2
    assert line.environment == {"CUDA_VISIBLE_DEVICES": "0,1", "A": "b"}
    assert line.words == ("torchrun", "--nproc_per_node", "gpu", "train.py", "--x")
    assert line.arguments == ("--x",)


def test_one_quoted_word_is_a_line() -> None:
    line = read_line(["torchrun --nproc_per_node $N 'my train.py'"], {"N": "4"})
    assert (line.count.ranks, line.program) == (4, "my train.py")


def test_a_hostfile_is_counted(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("# comment\na slots=8\nb slots=4\n")
    assert read(f"deepspeed --hostfile {hosts} train.py").count.ranks == 12
    assert read(f"deepspeed --hostfile {hosts} --num_nodes 1 train.py").count.ranks == 8
    assert read(f"deepspeed --hostfile {hosts} --num_gpus 2 train.py").count.ranks == 4
    assert read(f"deepspeed --hostfile {hosts} --include a:0@b train.py").count.ranks == 5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no command"),
        ("A=1", "no command"),
        ("torchrun --nproc_per_node 8", "starts no script"),
        ("srun -N 2", "starts no script"),
        ("python", "starts no script"),
        ("python -c pass", "python -c"),
        ("bash run.sh", "put dsplan check before that line"),
        ("./go.sh", "put dsplan check before that line"),
        ("frobnicate train.py", "is no launcher that check knows"),
        ("accelerate config", "accelerate launch only"),
        ("axolotl preprocess x.yml", "axolotl train only"),
        ("deepspeed --hostfile /no/such/file train.py", "hostfile cannot be read"),
    ],
)
def test_what_cannot_be_read_is_one_line(text: str, said: str) -> None:
    with pytest.raises(Problem, match=said) as problem:
        read(text)
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize("text", ["cd x && torchrun train.py", "torchrun train.py | tee log", "torchrun 'train.py"])
def test_the_shell_s_own_words_are_refused(text: str) -> None:
    with pytest.raises(Problem):
        read_line([text], {})
