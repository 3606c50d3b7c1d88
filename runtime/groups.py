"""The process group, the mesh over it, and the one voice of rank 0."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def init_distributed(dist_backend: str | None = None, *_: Any, **__: Any) -> None:
    """Join the process group of torchrun's environment, or a group of one where there is none.

    Does nothing where a group exists. DeepSpeed's other arguments are accepted and have no effect.
    """
    if dist.is_initialized():
        return
    cuda = torch.cuda.is_available()
    backend = "nccl" if cuda and dist_backend in (None, "nccl") else "gloo"
    if cuda:
        torch.cuda.set_device(local_rank())
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", 0))


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
