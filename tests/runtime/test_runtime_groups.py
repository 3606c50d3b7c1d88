"""init_distributed: backends, time limits, and ranks that do not come."""

import socket
from datetime import timedelta

import pytest
import torch.distributed as dist
from dsplan.runtime.groups import available_backend, group_limit, init_distributed
from dsplan.schemas.problem import Problem


@pytest.fixture
def alone(monkeypatch):
    """A process outside of any launch: no variable of one, and none left afterwards."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DEEPSPEED_TIMEOUT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    yield monkeypatch
    if dist.is_initialized():
        dist.destroy_process_group()


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def as_rank(patch, rank, world_size, port):
    for name, value in (("RANK", rank), ("LOCAL_RANK", 0), ("WORLD_SIZE", world_size), ("MASTER_ADDR", "localhost")):
        patch.setenv(name, str(value))
    patch.setenv("MASTER_PORT", str(port))


def test_without_a_launcher_a_group_of_one_with_the_limit_asked_for(alone):
    init_distributed(dist_backend="gloo", timeout=timedelta(seconds=77), verbose=False)
    assert (dist.get_rank(), dist.get_world_size(), group_limit()) == (0, 1, timedelta(seconds=77))
    init_distributed(timeout=5)  # there is a group, and it stays as it is
    assert group_limit() == timedelta(seconds=77)


def test_deepspeeds_variable_sets_the_limit_in_minutes(alone):
    alone.setenv("DEEPSPEED_TIMEOUT", "3")
    init_distributed("gloo")
    assert group_limit() == timedelta(minutes=3)


def test_one_task_of_slurm_is_a_group_of_one(alone):
    for name, value in (("SLURM_PROCID", "0"), ("SLURM_LOCALID", "0"), ("SLURM_NTASKS", "1"), ("SLURM_JOB_ID", "7")):
        alone.setenv(name, value)
    init_distributed("gloo")
    assert dist.get_world_size() == 1


def test_what_mpirun_says_becomes_what_scripts_read(alone, monkeypatch):
    for name, value in (("RANK", 0), ("SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_SIZE", 1)):
        alone.setenv(f"OMPI_COMM_WORLD_{name}", str(value))
    init_distributed("gloo", distributed_port=4711)
    import os

    assert [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")] == [
        "0", "1", "0", "127.0.0.1", "4711",
    ]  # fmt: skip


def test_a_rank_that_does_not_come_is_named(alone):
    as_rank(alone, 0, 3, free_port())
    with pytest.raises(Problem, match=r"^ranks 1, 2 of 3 did not arrive at init_distributed within 0.3 s of rank 0$"):
        init_distributed("gloo", timeout=0.3)


def test_nobody_at_the_address_of_rank_0(alone):
    port = free_port()
    as_rank(alone, 1, 2, port)
    with pytest.raises(
        Problem, match=rf"^rank 1 found nobody at localhost:{port} within 1 s, where rank 0 should listen"
    ):
        init_distributed("gloo", timeout=1)


def test_a_port_that_is_in_use_is_named(alone):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        as_rank(alone, 0, 2, port)
        with pytest.raises(Problem, match=rf"cannot listen at localhost:{port}: the port is in use; set MASTER_PORT"):
            init_distributed("gloo", timeout=1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dist_backend": "mpi"}, "is built without MPI, as all of PyTorch's own wheels are; use gloo or nccl"),
        ({"dist_backend": "ibverbs"}, "dist_backend is 'ibverbs', but must be one of nccl, gloo, mpi"),
        ({"timeout": 0}, "timeout is 0, but must be a timedelta or a number of seconds above 0"),
        ({"timeout": "30"}, "timeout is '30', but must be"),
        ({"dist_init_required": False}, "there is no process group; call torch.distributed.init_process_group first"),
        ({"rank": 1}, "WORLD_SIZE is not set, though RANK is"),
    ],
)
def test_what_cannot_be_is_one_line(alone, options, said):
    with pytest.raises(Problem) as caught:
        init_distributed(**options)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nccl_without_a_gpu_is_gloo_and_said(alone, capsys, monkeypatch):
    """A script for GPUs runs on a laptop."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    init_distributed("nccl")
    assert dist.get_backend() == "gloo"
    assert "nccl needs a GPU, and torch sees none on this machine; gloo is used" in capsys.readouterr().err
    assert available_backend("cpu:gloo,cuda:nccl") == "cpu:gloo,cuda:nccl"
