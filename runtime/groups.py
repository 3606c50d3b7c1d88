"""The process group, the mesh over it, and the one voice of rank 0."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from dsplan.runtime.launching import progress
from dsplan.runtime.launching.orders import current_orders
from dsplan.runtime.launching.placing import DEFAULT_PORT, Place, find_place
from dsplan.schemas.problem import Problem
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta | float | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Join the process group of torchrun's, mpirun's or SLURM's environment, or a group of one where there is none.

    DeepSpeed's arguments and meaning. Takes the group as it is where one exists. What `dsplan launch` was told (--backend,
    --timeout) goes first. timeout: of each collective, also in seconds; else DEEPSPEED_TIMEOUT in minutes, else PyTorch's.
    config is not read: it names no backend. Problem where the backend is not to be had, the environment holds half of what
    it takes, or a rank does not come. Source: deepspeed/comm/comm.py, init_distributed.
    """
    orders = current_orders()
    if orders is None:
        progress.chain_excepthook()
    limit = _limit(timeout if orders is None or orders.timeout_seconds is None else orders.timeout_seconds)
    ordered = None if orders is None else orders.backend
    if dist.is_initialized():
        _take_as_it_is(ordered, limit if orders is not None and orders.timeout_seconds is not None else None)
        return
    if dist_init_required is False:
        raise Problem(
            "dist_init_required is False, but there is no process group; call torch.distributed.init_process_group first, or "
            "leave it out"
        )
    backend = available_backend(ordered or dist_backend)
    if init_method is not None and not init_method.startswith("env://"):
        _join_by_url(backend, init_method, rank, world_size, limit)
    else:
        _join_by_environment(backend, rank, world_size, limit, distributed_port, auto_mpi_discovery, verbose)
    if backend == "gloo" and (ordered or dist_backend) == "nccl":
        note("nccl needs a GPU, and torch sees none on this machine; gloo is used")
    progress.watch(group_limit())


def _join_by_url(backend: str, url: str, rank: int, world_size: int, limit: timedelta | None) -> None:
    """init_method names the meeting place; who this rank is the arguments say, else the environment."""
    place = find_place(os.environ) if rank < 0 or world_size < 1 else None
    if place is not None:
        os.environ.update(place.variables())
        rank, world_size = place.rank, place.world_size
    _set_device(backend)
    dist.init_process_group(backend, init_method=url, timeout=limit, rank=rank, world_size=world_size)


def _join_by_environment(
    backend: str, rank: int, world_size: int, limit: timedelta | None, port: int, discover: bool, verbose: bool
) -> None:
    known = dict(os.environ)
    if rank >= 0:
        known["RANK"] = str(rank)
    if world_size > 0:
        known["WORLD_SIZE"] = str(world_size)
    place = find_place(known, port=port, discover=discover)
    if place is not None:
        os.environ.update(place.variables())
    _set_device(backend)
    if backend == "mpi":  # knows its ranks itself
        dist.init_process_group("mpi")
        return
    if place is None or place.world_size == 1:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=limit)
        return
    store = _meet(place, limit or dist.distributed_c10d.default_pg_timeout)
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size, timeout=limit)
    if verbose and place.launcher != "torchrun":
        note(f"{place.world_size} ranks by {place.launcher}, rank 0 on {place.address}, port {place.port}")


def _meet(place: Place, limit: timedelta) -> Store:
    """The store that all ranks share, once all are there. Problem that names those that do not come.

    Under torchrun the store outlives a restart, and what the ranks before wrote there would mislead those after: each
    start has names of its own.
    """
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    where = f"{place.address}:{place.port}"
    try:
        shared = TCPStore(
            place.address,
            place.port,
            place.world_size,
            is_master=place.rank == 0 and not kept,
            timeout=limit,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except dist.DistError as error:
        if "EADDRINUSE" in str(error):
            raise Problem(
                f"rank 0 cannot listen at {where}: the port is in use; set MASTER_PORT to a free one"
            ) from error
        raise Problem(
            f"rank {place.rank} found nobody at {where} within {limit.total_seconds():g} s, where rank 0 should listen "
            f"(MASTER_ADDR and MASTER_PORT, by {place.launcher})"
        ) from error
    store = PrefixStore(f"try{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", shared)
    keys = [f"dsplan/arrived/{rank}" for rank in range(place.world_size)]
    store.set(keys[place.rank], "")
    try:
        store.wait(keys, limit)
    except dist.DistError as error:
        absent = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        if not absent:
            raise
        raise Problem(
            f"rank{'s' if len(absent) > 1 else ''} {', '.join(absent[:8])}{' and more' if len(absent) > 8 else ''} of "
            f"{place.world_size} did not arrive at init_distributed within {limit.total_seconds():g} s of rank {place.rank}"
        ) from error
    return store


def _take_as_it_is(ordered: str | None, limit: timedelta | None) -> None:
    """The script made its group itself: only its time limit can still be changed."""
    if limit is not None and carries_data():
        dist.distributed_c10d._set_pg_timeout(limit)
    if ordered is not None and ordered not in str(dist.get_backend()):
        note(f"--backend {ordered} has no effect: the script made its process group itself, with {dist.get_backend()}")
    if carries_data():
        progress.watch(group_limit())


def available_backend(wanted: str | None) -> str:
    """Its name; Problem where torch does not have it. nccl without a GPU is gloo, so that a script for GPUs runs on a laptop."""
    cuda = torch.cuda.is_available()
    name = (wanted or ("nccl" if cuda else "gloo")).lower()
    if ":" in name:  # cpu:gloo,cuda:nccl
        return name
    if name not in dist.Backend.backend_list or name == "undefined":
        raise Problem(f"dist_backend is {wanted!r}, but must be one of nccl, gloo, mpi")
    if name == "mpi" and not dist.is_mpi_available():
        raise Problem(
            f"this torch ({torch.__version__}) is built without MPI, as all of PyTorch's own wheels are; use gloo or nccl, "
            "which mpirun starts as well (ranks are read from its environment), or build torch from source where MPI is installed"
        )
    if name == "nccl" and not cuda:
        return "gloo"
    if name == "nccl" and not dist.is_nccl_available():
        raise Problem(f"this torch ({torch.__version__}) is built without NCCL; use gloo")
    return name


def _limit(given: timedelta | float | None) -> timedelta | None:
    minutes = os.environ.get("DEEPSPEED_TIMEOUT")
    if given is None and minutes:
        if not minutes.isdigit() or int(minutes) < 1:
            raise Problem(f"DEEPSPEED_TIMEOUT is {minutes!r}, but must be a whole number of minutes, at least 1")
        return timedelta(minutes=int(minutes))
    if given is None or isinstance(given, timedelta):
        return given
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not given > 0:
        raise Problem(f"timeout is {given!r}, but must be a timedelta or a number of seconds above 0")
    return timedelta(seconds=given)


def group_limit() -> timedelta:
    """How long a collective of the process group may wait."""
    group = dist.distributed_c10d._get_default_group()
    for device in group._device_types:
        limit = getattr(getattr(group._get_backend(device), "options", None), "_timeout", None)
        if isinstance(limit, timedelta):
            return limit
    return dist.distributed_c10d.default_pg_timeout


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", 0))


def _set_device(backend: str) -> None:
    if not torch.cuda.is_available() or backend in ("gloo", "mpi"):
        return
    if local_rank() >= torch.cuda.device_count():
        raise Problem(
            f"this is local rank {local_rank()}, but the machine shows {torch.cuda.device_count()} GPUs; start one process per "
            "GPU, with LOCAL_RANK counted per machine"
        )
    torch.cuda.set_device(local_rank())


def own_device() -> torch.device:
    """Where this rank computes: the GPU of its local rank, or the host where the group's backend is one for hosts."""
    if not torch.cuda.is_available() or dist.get_backend() in ("gloo", "mpi", "fake"):
        return torch.device("cpu")
    torch.cuda.set_device(local_rank())
    return torch.device("cuda", local_rank())


def data_parallel_mesh(device: torch.device) -> DeviceMesh:
    """One axis over all ranks, named dp. Its own tensors are real, also where the model's are fake (in a rehearsal)."""
    with unset_fake_temporarily():
        return init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))


def carries_data() -> bool:
    """False in a fake process group, whose collectives move nothing: what ranks would tell each other is not known."""
    return bool(dist.get_backend() != "fake")


def note(text: str) -> None:
    """One line for people, from rank 0 alone."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"dsplan: {text}", file=sys.stderr, flush=True)
