"""deepspeed.comm is torch.distributed under another name."""

from dsplan.runtime import init_distributed
from dsplan.runtime.groups import local_rank as get_local_rank
from dsplan.runtime.measuring.comms_log import (
    get_comm_operation_count,
    get_logged_operations,
    has_comm_data,
    log_summary,
    reset_log,
)
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
    "get_comm_operation_count",
    "get_local_rank",
    "get_logged_operations",
    "get_rank",
    "get_world_size",
    "has_comm_data",
    "init_distributed",
    "is_initialized",
    "log_summary",
    "new_group",
    "reset_log",
]
