"""Which rank a process is, from the environments that launchers leave. Values as the launchers' manuals give them."""

import pytest
from dsplan.runtime.launching.placing import find_place, first_host
from dsplan.schemas.problem import Problem

TORCHRUN = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node7", "MASTER_PORT": "1234"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
SRUN = {
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "2",
    "SLURM_NTASKS": "8",
    "SLURM_JOB_NODELIST": "gpu[003-004]",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "120042",
}
# What a batch script sees before any srun: the variables of task 0 beside the whole job's.
BATCH = {**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "ENVIRONMENT": "BATCH"}
del BATCH["SLURM_STEP_ID"]


def found(environment, **options):
    place = find_place(environment, **options)
    return place and (place.rank, place.local_rank, place.world_size, place.address, place.port)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (TORCHRUN, (3, 1, 4, "node7", 1234)),
        ({**OPEN_MPI, "MASTER_ADDR": "head"}, (5, 1, 8, "head", 29500)),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, (5, 1, 8, "127.0.0.1", 29500)),
        (
            {
                "MV2_COMM_WORLD_RANK": "1",
                "MV2_COMM_WORLD_SIZE": "2",
                "MV2_COMM_WORLD_LOCAL_RANK": "1",
                "MV2_COMM_WORLD_LOCAL_SIZE": "2",
            },
            (1, 1, 2, "127.0.0.1", 29500),
        ),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
            (1, 1, 2, "127.0.0.1", 29500),
        ),
        (SRUN, (6, 2, 8, "gpu003", 29500 + 42)),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "7"}, (6, 2, 7, "gpu003", 29542)),
        ({**SRUN, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "777"}, (6, 2, 8, "10.0.0.1", 777)),
        # a script that exports what torch wants, all but the rank
        ({**SRUN, "WORLD_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, (6, 2, 8, "a", 1)),
        # torchrun, and mpirun, inside a job: the job's own variables are those of the task that started them
        ({**BATCH, **TORCHRUN}, (3, 1, 4, "node7", 1234)),
        ({**BATCH, **OPEN_MPI}, (5, 1, 8, "gpu003", 29500)),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, (0, 0, 1, "127.0.0.1", 29500)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, (0, 0, 1, "localhost", 29500)),
    ],
)
def test_each_launchers_environment_gives_the_rank(environment, expected):
    assert found(environment) == expected


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
        BATCH,
        {**SRUN, "SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
        {**SRUN, "SLURM_STEP_ID": "4294967291"},
        {**SRUN, "SLURM_STEP_ID": "4294967290"},
        {**SRUN, "SLURM_PTY_PORT": "45321"},
        {"SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "gpu[003-004]", "SLURM_JOB_ID": "1"},  # the shell of salloc
    ],
)
def test_a_process_that_no_launcher_started_is_alone(environment):
    assert find_place(environment) is None


def test_without_discovery_only_torchruns_variables_count():
    assert find_place(SRUN, discover=False) is None
    assert find_place(OPEN_MPI, discover=False) is None
    assert found(TORCHRUN, discover=False) == (3, 1, 4, "node7", 1234)


def test_a_port_that_is_asked_for_is_not_moved_by_the_job():
    assert found(SRUN, port=4000)[-1] == 4000


def without(environment, name):
    return {key: value for key, value in environment.items() if key != name}


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (without(TORCHRUN, "WORLD_SIZE"), "WORLD_SIZE is not set, though RANK and LOCAL_RANK are"),
        (without(TORCHRUN, "RANK"), "RANK is not set, though WORLD_SIZE and LOCAL_RANK are"),
        (without(TORCHRUN, "MASTER_ADDR"), "MASTER_ADDR is not set, though RANK"),
        (without(OPEN_MPI, "OMPI_COMM_WORLD_SIZE"), "OMPI_COMM_WORLD_SIZE is not set, though OMPI_COMM_WORLD_RANK"),
        (without(OPEN_MPI, "OMPI_COMM_WORLD_RANK"), "OMPI_COMM_WORLD_RANK is not set, though OMPI_COMM_WORLD_SIZE"),
        (without(OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK"), "OMPI_COMM_WORLD_LOCAL_RANK is not set"),
        (OPEN_MPI, "MASTER_ADDR is not set"),
        (without(SRUN, "SLURM_PROCID"), "SLURM_PROCID is not set, though SLURM_NTASKS and SLURM_LOCALID are"),
        (without(SRUN, "SLURM_LOCALID"), "SLURM_LOCALID is not set, though SLURM_PROCID and SLURM_NTASKS are"),
        (without(SRUN, "SLURM_JOB_NODELIST"), "SLURM_JOB_NODELIST is not set"),
        (without(SRUN, "SLURM_NTASKS"), "SLURM_NTASKS is not set, though SLURM_PROCID and SLURM_LOCALID are"),
        ({**TORCHRUN, "RANK": "4"}, "RANK is 4 in the environment, but of 4 ranks the last is 3"),
        ({**TORCHRUN, "WORLD_SIZE": "four"}, "WORLD_SIZE is 'four' in the environment, but must be a whole number"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT is '70000' in the environment, but must be a port"),
    ],
)
def test_half_of_an_environment_is_refused_with_the_variable_that_is_missing(environment, said):
    with pytest.raises(Problem) as caught:
        find_place(environment)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[003-006,9],cpu1", "gpu003"),
        ("gpu[7,9-12]", "gpu7"),
        ("rack[1-2]n[01-16]", "rack1n01"),
        ("a-b[2-3]-ib", "a-b2-ib"),
        ("login,gpu[1-2]", "login"),
        ("n[10-11].cluster.example", "n10.cluster.example"),
    ],
)
def test_the_first_machine_of_a_slurm_node_list(nodes, first):
    """scontrol show hostnames, by its manual."""
    assert first_host(nodes) == first
