"""deepspeed.comm is torch.distributed under another name."""

from dsplan.runtime import init_distributed
from dsplan.runtime.groups import local_rank as get_local_rank
from torch.distributed import *  # noqa: F403
from torch.distributed import (
    ReduceOp,
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    get_rank,
    get_world_size,
    is_initialized,
    new_group,
)

__all__ = [
    "ReduceOp",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "init_distributed",
    "is_initialized",
    "new_group",
]
