"""Launch lines: who starts how many ranks of what."""

from pathlib import Path

import pytest
from dsplan.planner.auditing.launch_lines import LaunchLine, read_line
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
        ("env -u A -i B=1 torchrun --nproc_per_node 2 train.py", 2, 1, "train.py"),
        ("uv run --with deepspeed --python 3.11 torchrun --nproc_per_node 2 train.py", 2, 1, "train.py"),
        ("uv run -m torch.distributed.run --nproc_per_node 2 train.py", 2, 1, "train.py"),
        ("conda run -n env --no-capture-output torchrun --nproc_per_node 2 train.py", 2, 1, "train.py"),
        ("nice -n 10 numactl --cpunodebind=0 -m 0 torchrun --nproc_per_node 2 train.py", 2, 1, "train.py"),
        ("timeout -k 5 1h taskset -c 0-3 stdbuf -oL torchrun --nproc_per_node 2 train.py", 2, 1, "train.py"),
        ("nsys profile -o out --trace=cuda torchrun --nproc_per_node 2 train.py", 2, 1, "train.py"),
        ("srun -n 4 apptainer exec --nv -B /a:/b image.sif python train.py", 4, 1, "train.py"),
        ("deepspeed --num_accelerators 4 train.py", 4, 1, "train.py"),
        ("srun -N1-4 -n8 python train.py", 8, 1, "train.py"),
        ("srun -N1-4 --ntasks-per-node=8 python train.py", None, 1, "train.py"),
        ("srun -lun4 -K1 -Jname --exclusive=user python train.py", 4, 1, "train.py"),
        ("srun --ntasks-per-gpu=1 --gpus=h100:8 python train.py", 8, 1, "train.py"),
        ("srun -N2 --ntasks-per-gpu=1 --gpus-per-node=8 python train.py", 16, 2, "train.py"),
        ("mpirun -H a:8,b:8 python train.py", 16, 2, "train.py"),
        ("mpiexec.hydra -n 8 python train.py", 8, 1, "train.py"),
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


@pytest.mark.parametrize(
    ("text", "ranks", "program"),
    [
        ("torchrun $FLAGS train.py --x 'a b'", 8, "train.py"),
        ("torchrun --nproc_per_node ${N:-3} train.py", 3, "train.py"),
        ("torchrun --nproc_per_node $UNSET train.py", None, "train.py"),
        ("deepspeed --num_gpus $UNSET train.py", None, "train.py"),
        ("accelerate launch --num_processes $UNSET train.py", None, "train.py"),
        ("srun -n $UNSET python train.py", None, "train.py"),
        ('torchrun --nproc_per_node "$(nvidia-smi -L | wc -l)" train.py', None, "train.py"),
        ("torchrun --nproc_per_node $(nvidia-smi -L | wc -l) train.py", None, "train.py"),
        ("torchrun --nproc_per_node 2 \\\n  train.py --x 1", 2, "train.py"),
        ("nohup torchrun --nproc_per_node 2 train.py > log 2>&1 &", 2, "train.py"),
        ("torchrun --nproc_per_node 2 train.py --x 1 2>&1 | tee log", 2, "train.py"),
        ("torchrun --nproc_per_node 2 train.py --x '>' &> 'my log'", 2, "train.py"),
        ("A=1 bash -lc 'N=4 torchrun --nproc_per_node 2 train.py'", 2, "train.py"),
    ],
)
def test_what_the_shell_makes_of_a_quoted_line(text: str, ranks: int | None, program: str) -> None:
    line = read_line([text], {"FLAGS": "--nproc_per_node 4 --nnodes 2"})
    assert (line.count.ranks, line.program) == (ranks, program)


def test_redirections_are_no_arguments_and_bash_runs_the_line() -> None:
    text = "torchrun train.py --x 2 > log 2>&1 &"
    line = read_line([text], {})
    assert line.arguments == ("--x", "2")
    assert line.words == ("bash", "-c", text)
    assert read_line(["torchrun train.py $UNSET"], {}).words[0] == "bash"
    assert read_line(["exec", "torchrun", "my train.py"], {}).words == ("bash", "-c", "exec torchrun 'my train.py'")
    plain = read_line(["torchrun train.py --x '> 2'"], {})
    assert plain.words == ("torchrun", "train.py", "--x", "> 2")


def test_excluded_slots_are_not_counted(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=4\nb slots=4\nc slots=2\n")
    assert read(f"deepspeed --hostfile {hosts} --exclude c train.py").count.ranks == 8
    assert read(f"deepspeed --hostfile {hosts} -e a:0,1@c train.py").count.ranks == 6


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
        ("uv pip install torch", "uv run only"),
        ("docker run --gpus all image torchrun train.py", "put dsplan check before that line"),
        ("deepspeed --include localhost:0 --num_gpus 2 train.py", "beside --include"),
        ("torchrun $FLAGS train.py", r"\$FLAGS, which is not set"),
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


@pytest.mark.parametrize(
    "text", ["cd x && torchrun train.py", "torchrun train.py; echo", "torchrun 'train.py", "torchrun train.py <(cat x)"]
)
def test_the_shell_s_own_words_are_refused(text: str) -> None:
    with pytest.raises(Problem):
        read_line([text], {})
