"""comms_logger: how often each collective ran on what size, and how long it took.

Functions of torch.distributed are wrapped where they are looked up, so that FSDP2's collectives are seen and the script's too.
On a GPU each is waited for, which costs the overlap with computation, as it does in DeepSpeed.
Source of names and of the two rates: deepspeed/utils/comms_logging.py (0.19.8), and NVIDIA's nccl-tests, PERFORMANCE.md.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import torch
import torch.distributed as dist
from dsplan.reports.comms_table import Timing, as_text
from dsplan.runtime.groups import note
from dsplan.schemas.units import seconds, size

KINDS = {
    "all_gather_single": "all_gather",
    "reduce_scatter_single": "reduce_scatter",
    "all_gather_into_tensor": "all_gather",
    "all_gather": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter": "reduce_scatter",
    "all_reduce": "all_reduce",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "all_to_all_single": "all_to_all",
    "all_to_all": "all_to_all",
}
"""Functions of torch.distributed, and the ledger's name for what they do. FSDP2 calls the first two."""
_seen: dict[tuple[str, int], list[float]] = {}
"""(kind, payload_bytes) -> seconds of each call. payload_bytes: the full tensor, of which all-gather is given a part."""
_on = False


def enable(block: Mapping[str, Any]) -> None:
    """Wrap the functions, once in a process. block: comms_logger's. prof_ops counts where prof_all is false."""
    global _on
    wanted = None if block.get("prof_all", True) else set(block.get("prof_ops", []))
    verbose, debug = block.get("verbose", False) is True, block.get("debug", False) is True
    for name, kind in {} if _on else KINDS.items():
        if wanted is None or name in wanted or kind in wanted:
            setattr(dist, name, _timed(getattr(dist, name), kind, verbose, debug))
    _on = True


def _timed(function: Callable[..., Any], kind: str, verbose: bool, debug: bool) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        payload = payload_bytes(args, kwargs)
        caller = sys._getframe(1).f_code.co_name if debug else ""
        start = time.perf_counter()
        work = function(*args, **kwargs)

        def ended(_: Any = None) -> None:
            taken = time.perf_counter() - start
            _seen.setdefault((kind, payload), []).append(taken)
            if verbose:
                note(f"{kind}{f' by {caller}' if caller else ''}: {size(payload)} in {seconds(taken)}")

        if torch.cuda.is_available():
            if work is not None:
                work.wait()
            torch.cuda.synchronize()
            ended()
        elif work is None:
            ended()
        else:
            work.get_future().add_done_callback(ended)
        return work

    return wrapped


def payload_bytes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Of the largest argument, a tensor or a list of them: what is gathered, before it is scattered, or sent."""
    sizes = [0]
    for value in (*args, *kwargs.values()):
        tensors = value if isinstance(value, (list, tuple)) else [value]
        sizes.append(sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor)))
    return max(sizes)


def timings() -> list[Timing]:
    """By kind and size, in the order in which they first came."""
    world = dist.get_world_size()
    return [
        Timing(kind=kind, payload_bytes=payload, count=len(taken), seconds=sum(taken), ranks=world)
        for (kind, payload), taken in _seen.items()
    ]


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Print on rank 0 what was logged so far. Every rank must call it. return_dict: the same in DeepSpeed's form."""
    dist.barrier()
    held = timings()
    waited: dict[tuple[str, int], float] = {}
    if show_straggler:
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, {(timing.kind, timing.payload_bytes): timing.seconds for timing in held})
        least = {key: min(rank.get(key, float("inf")) for rank in ranks) for key in ranks[dist.get_rank()]}
        waited = {(t.kind, t.payload_bytes): t.seconds - least[t.kind, t.payload_bytes] for t in held}
    if dist.get_rank() == 0:
        print(as_text(held, waited), flush=True)
    return _as_dict(held, waited) if return_dict else None


def _as_dict(held: list[Timing], waited: Mapping[tuple[str, int], float]) -> dict[str, Any]:
    summary: dict[str, dict[int, dict[str, Any]]] = {}
    straggling: dict[str, dict[int, dict[str, Any]]] = {}
    for timing in held:
        common = {
            "count": timing.count,
            "msg_size_bytes": timing.payload_bytes,
            "msg_size_str": size(timing.payload_bytes),
        }
        summary.setdefault(timing.kind, {})[timing.payload_bytes] = {
            **common,
            "total_latency_ms": timing.seconds * 1e3,
            "avg_latency_ms": timing.mean_seconds * 1e3,
            "tput_avg_gbps": timing.payload_bytes_per_second * 8 / 1e9,
            "busbw_avg_gbps": timing.bus_bytes_per_second * 8 / 1e9,
        }
        lost = waited.get((timing.kind, timing.payload_bytes), 0.0)
        straggling.setdefault(timing.kind, {})[timing.payload_bytes] = {
            **common,
            "total_comm_lat_ms": (timing.seconds - lost) * 1e3,
            "total_straggler_ms": lost * 1e3,
            "avg_comm_lat_ms": (timing.seconds - lost) / timing.count * 1e3,
            "avg_straggler_ms": lost / timing.count * 1e3,
        }
    return {
        "summary": summary,
        "straggler_analysis": straggling if waited else None,
        "metadata": {
            "world_size": dist.get_world_size(),
            "rank": dist.get_rank(),
            "timestamp": datetime.now().isoformat(),
        },
    }


def reset_log() -> None:
    """Forget what was logged: a summary by epoch."""
    _seen.clear()


def has_comm_data() -> bool:
    return bool(_seen)


def get_comm_operation_count() -> int:
    return sum(map(len, _seen.values()))


def get_logged_operations() -> list[str]:
    return list(dict.fromkeys(kind for kind, _ in _seen))
