"""Which rank this process is: from torchrun's environment, mpirun's or SLURM's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from dsplan.schemas.problem import Problem

DEFAULT_PORT = 29500
"""DeepSpeed's and PyTorch's. Source: deepspeed/constants.py, TORCH_DISTRIBUTED_DEFAULT_PORT."""
JOB_PORTS = 1000
"""SLURM jobs that share a machine take ports next to each other, by the job's number."""


@dataclass(frozen=True, kw_only=True)
class Names:
    """The variables of one kind of launcher; a tuple's first that is set counts."""

    launcher: str
    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...]


# The launchers whose variables go together. mpirun inside a SLURM job leaves SLURM's of the batch script in place, and so
# MPI goes first. Sources: the manuals of Open MPI (mpirun), MVAPICH2, Hydra (MPICH, Intel MPI) and srun.
MPI = (
    Names(
        launcher="Open MPI",
        rank=("OMPI_COMM_WORLD_RANK",),
        world_size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
    ),
    Names(
        launcher="MVAPICH2",
        rank=("MV2_COMM_WORLD_RANK",),
        world_size=("MV2_COMM_WORLD_SIZE",),
        local_rank=("MV2_COMM_WORLD_LOCAL_RANK",),
    ),
    Names(
        launcher="MPI",
        rank=("PMI_RANK",),
        world_size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "SLURM_LOCALID"),
    ),
)
SLURM = Names(
    launcher="SLURM",
    rank=("SLURM_PROCID",),
    world_size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
    local_rank=("SLURM_LOCALID",),
)
NODES = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
NO_STEPS = ("4294967290", "4294967291")
"""SLURM_STEP_ID of an interactive shell and of a batch script. Source: slurm.h, SLURM_INTERACTIVE_STEP, SLURM_BATCH_SCRIPT."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """One rank among world_size, and where rank 0 listens. launcher: who said so, for messages."""

    rank: int
    local_rank: int
    world_size: int
    address: str
    port: int
    launcher: str

    def variables(self) -> dict[str, str]:
        """As torchrun sets them, and as scripts read them."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


def find_place(environment: Mapping[str, str], *, port: int = DEFAULT_PORT, discover: bool = True) -> Place | None:
    """The rank that the environment says; None where this process is alone.

    torchrun's variables go before MPI's, and those before SLURM's; where a script exports some of torchrun's
    (MASTER_ADDR, WORLD_SIZE), its launcher fills in the rest. Without discover only torchrun's are read. Problem that names
    the variable where one is missing or no number.
    """
    scheduler = _scheduler(environment) if discover else None
    if "RANK" in environment or (scheduler is None and "WORLD_SIZE" in environment):
        return _of_torchrun(environment, scheduler, port)
    return _of_scheduler(environment, scheduler, port) if scheduler is not None else None


def _of_torchrun(environment: Mapping[str, str], scheduler: Names | None, port: int) -> Place:
    names = Names(launcher="torchrun", rank=("RANK",), world_size=("WORLD_SIZE",), local_rank=("LOCAL_RANK",))
    rank, world_size = _number(environment, names, names.rank), _number(environment, names, names.world_size)
    local = names.local_rank + (scheduler.local_rank if scheduler is not None else ())
    local_rank = _number(environment, names, local) if any(name in environment for name in local) else rank
    if "MASTER_ADDR" not in environment and world_size > 1:
        raise _missing(names, "MASTER_ADDR", environment, " (the machine of rank 0)")
    return Place(
        rank=_below(rank, world_size, "RANK"),
        local_rank=local_rank,
        world_size=world_size,
        address=environment.get("MASTER_ADDR", "localhost"),
        port=_port(environment, port),
        launcher="torchrun",
    )


def _of_scheduler(environment: Mapping[str, str], names: Names, port: int) -> Place:
    """What a script exported for torch goes first: WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT."""
    rank = _number(environment, names, names.rank)
    world_size = _number(environment, names, ("WORLD_SIZE", *names.world_size))
    local_rank = 0 if world_size == 1 else _number(environment, names, ("LOCAL_RANK", *names.local_rank))
    return Place(
        rank=_below(rank, world_size, names.rank[0]),
        local_rank=local_rank,
        world_size=world_size,
        address=_address(environment, names, world_size),
        port=_port(environment, _job_port(environment, port) if names is SLURM else port),
        launcher=names.launcher,
    )


def _scheduler(environment: Mapping[str, str]) -> Names | None:
    """MPI or SLURM, where it started this process as one of several ranks, or said so by halves."""
    for names in MPI:
        if any(name in environment for name in (*names.rank, *names.world_size)):
            return names
    first = environment.get("SLURM_PROCID", "0") == "0"
    tasks = next((environment[name] for name in SLURM.world_size if name in environment), "1" if first else "")
    placed = "SLURM_PROCID" in environment or "SLURM_LOCALID" in environment
    step = environment.get("SLURM_STEP_ID", environment.get("SLURM_STEPID"))
    # The batch script itself and a shell of srun --pty have the variables of task 0, and are no ranks.
    alone = step in NO_STEPS or (step is None and environment.get("ENVIRONMENT") == "BATCH")
    return SLURM if tasks != "1" and placed and not alone and "SLURM_PTY_PORT" not in environment else None


def _address(environment: Mapping[str, str], names: Names, world_size: int) -> str:
    """The machine of rank 0: as exported, the first of SLURM's nodes, or this one where all ranks are on it."""
    if "MASTER_ADDR" in environment:
        return environment["MASTER_ADDR"]
    nodes = next((environment[name] for name in NODES if environment.get(name)), None)
    if nodes is not None:
        return first_host(nodes)
    here = next(
        (
            environment[name]
            for name in ("OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")
            if name in environment
        ),
        None,
    )
    if world_size == 1 or here == str(world_size):
        return "127.0.0.1"
    if names is SLURM:
        raise _missing(names, "SLURM_JOB_NODELIST", environment, " (or MASTER_ADDR, the machine of rank 0)")
    raise _missing(names, "MASTER_ADDR", environment, " to the machine of rank 0 (mpirun -x MASTER_ADDR=HOST)")


def first_host(nodes: str) -> str:
    """The first machine of a SLURM node list: "gpu[003-006,9],cpu1" -> "gpu003"."""
    outside = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    first = outside.group() if outside else nodes
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first).strip()


def _job_port(environment: Mapping[str, str], port: int) -> int:
    job = environment.get("SLURM_JOB_ID", environment.get("SLURM_JOBID", ""))
    return port + int(job) % JOB_PORTS if port == DEFAULT_PORT and job.isdigit() else port


def _port(environment: Mapping[str, str], default: int) -> int:
    text = environment.get("MASTER_PORT", str(default))
    if not text.isdigit() or not 0 < int(text) < 1 << 16:
        raise Problem(f"MASTER_PORT is {text!r} in the environment, but must be a port: 1 to 65535")
    return int(text)


def _number(environment: Mapping[str, str], names: Names, variables: tuple[str, ...]) -> int:
    name = next((name for name in variables if name in environment), None)
    if name is None:
        own = [variable for variable in variables if variable not in ("WORLD_SIZE", "LOCAL_RANK")] or [variables[0]]
        raise _missing(names, "SLURM_NTASKS" if "SLURM_NTASKS" in own else own[0], environment, "")
    text = environment[name]
    if not text.isdigit():
        raise Problem(f"{name} is {text!r} in the environment, but must be a whole number of at least 0")
    return int(text)


def _below(rank: int, world_size: int, name: str) -> int:
    if rank >= world_size:
        raise Problem(f"{name} is {rank} in the environment, but of {world_size} ranks the last is {world_size - 1}")
    return rank


def _missing(names: Names, variable: str, environment: Mapping[str, str], rest: str) -> Problem:
    seen = [name for name in (*names.rank, *names.world_size, *names.local_rank) if name in environment]
    return Problem(
        f"{variable} is not set, though {' and '.join(seen)} {'is' if len(seen) == 1 else 'are'}: "
        f"half of what {names.launcher} sets for a rank; set {variable}{rest}, or unset the others to train on one process"
    )
