"""Where each rank is, so that a collective that waits in vain can name the ranks that did not come.

Each rank keeps its position in memory, which costs the loop nothing; a thread writes it to the process group's store every
now and then, through a connection of its own. A rank whose collective failed reads those of the others.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from dsplan.runtime.measuring.observing import Observer
from dsplan.schemas.problem import Problem
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

PERIOD_SECONDS = 2.0
"""Between two words of a rank; a quarter of the time limit where that is shorter."""
READ_SECONDS = 5
"""How long the store may take to answer; it may have gone with rank 0."""
SHOWN = 8
"""Ranks named in one message."""
NEAR_LIMIT = 0.9
"""NCCL's watchdog ends the process at the time limit: what there is to say must be said before."""


@dataclass(frozen=True)
class Position:
    """What a rank did last. collectives: how many it has begun. at: the script's line. heard: seconds since 1970."""

    step: int
    doing: str
    collectives: int
    at: str
    heard: float
    ended: bool = False

    def told(self) -> str:
        where = f", {self.at}" if self.at else ""
        if self.ended:
            return f"{self.doing} after {self.step} steps{where}"
        return f"is at step {self.step}, {self.doing}{where}"


class Progress(Observer):
    """This rank's position, as an observer of the engine, and the thread that tells it. One per process group."""

    def __init__(self, store: Store, rank: int, world_size: int, limit: timedelta):
        self.rank = rank
        self.limit = limit
        self.doing = "before its first step"
        self.collectives = 0
        self._ended = False
        self._store = store
        self._world_size = world_size
        self._engine: Callable[[], Any] = lambda: None
        self._changed = time.time()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._tell_on, name="dsplan progress", daemon=True)
        self._main = threading.main_thread().ident

    def start(self) -> None:
        self._thread.start()

    def follow(self, engine: Any) -> None:
        """Watch this engine's loop from now on."""
        self._engine = weakref.ref(engine)
        engine.observers.append(self)

    @property
    def step(self) -> int:
        return getattr(self._engine(), "global_steps", 0)

    # --- the engine's observer ---

    def forward_begins(self, inputs: list[torch.Tensor]) -> None:
        self.doing = "forward"

    def backward_begins(self) -> None:
        self.doing = "backward"

    def step_begins(self) -> None:
        self.doing = "step"

    def step_ends(self) -> None:
        self.doing = "between steps"

    # --- telling and reading ---

    def end(self, doing: str, at: str = "") -> None:
        """The last word of this rank."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._ended, self.doing = True, doing
        with contextlib.suppress(Exception):  # the store has gone with rank 0
            self._put(self._position(at))

    def tell(self) -> None:
        """Write this rank's position to the store."""
        self.collectives, before = _count_collectives(), self.collectives
        if self.collectives != before:
            self._changed = time.time()
        self._put(self._position(_line_of_script(sys._current_frames().get(self._main or 0))))

    def positions(self) -> dict[int, Position]:
        """Of every rank that has said something. Raises where the store does not answer."""
        self._store.set_timeout(timedelta(seconds=READ_SECONDS))
        keys = [_key(rank) for rank in range(self._world_size)]
        there = [rank for rank, key in enumerate(keys) if self._store.check([key])]
        return {rank: Position(**json.loads(self._store.get(keys[rank]))) for rank in there}

    def explain(self, at: str = "") -> str | None:
        """One line on the ranks that others wait for; None where the store does not answer."""
        try:
            self.tell()
            held = self.positions()
        except Exception:  # whatever it is, the error that led here is the one to be shown
            return None
        mine = self._position(at or held[self.rank].at)
        return describe(held | {self.rank: mine}, self.rank, self._world_size, self.limit.total_seconds(), time.time())

    def _position(self, at: str) -> Position:
        return Position(self.step, self.doing, self.collectives, at, time.time(), self._ended)

    def _put(self, position: Position) -> None:
        self._store.set(_key(self.rank), json.dumps(asdict(position)))

    def _tell_on(self) -> None:
        limit = self.limit.total_seconds()
        period = min(PERIOD_SECONDS, limit / 4)
        said = False
        try:
            while not self._stop.wait(period) and dist.is_initialized():
                self.tell()
                waited = time.time() - self._changed
                if waited > NEAR_LIMIT * limit and not said and _ends_without_a_word():
                    said = True
                    self._warn(waited)
        except Exception:  # the store has gone with rank 0: there is nobody to tell any more
            return

    def _warn(self, waited: float) -> None:
        held = self.positions()
        if lagging(held, self.rank, self._world_size):
            text = describe(held, self.rank, self._world_size, waited, time.time())
            leave_word(text)
            print(f"dsplan: {text}", file=sys.stderr, flush=True)


def lagging(held: Mapping[int, Position], rank: int, world_size: int) -> list[int]:
    """The ranks that have begun fewer collectives than this one, or said nothing at all."""
    mine = held[rank].collectives
    return [other for other in range(world_size) if other not in held or held[other].collectives < mine]


def describe(held: Mapping[int, Position], rank: int, world_size: int, waited_seconds: float, now: float) -> str:
    """One line: where this rank waits, for how long, and who did not come."""
    mine = held[rank]
    place = f"step {mine.step}, {mine.doing}" + (f", {mine.at}" if mine.at else "")
    absent = lagging(held, rank, world_size)
    if absent:
        told = "; ".join(_of(other, held.get(other), mine, now) for other in absent[:SHOWN])
        more = f"; and {len(absent) - SHOWN} more" if len(absent) > SHOWN else ""
        return f"{_ranks(absent)} did not arrive where rank {rank} waits ({place}): {told}{more}"
    told = "; ".join(f"rank {other} {held[other].told()}" for other in range(min(world_size, SHOWN)) if other != rank)
    return (
        f"rank {rank} waited {waited_seconds:.3g} s in vain ({place}), where all ranks have begun as many collectives, but "
        f"not the same: {told}"
    )


def _of(rank: int, position: Position | None, mine: Position, now: float) -> str:
    if position is None:
        return f"rank {rank} has said nothing since the start"
    silent = now - position.heard
    quiet = f", silent for {silent:.0f} s" if silent > 3 * PERIOD_SECONDS and not position.ended else ""
    return f"rank {rank} {position.told()}{quiet}"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:SHOWN])
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}" + (" and more" if len(ranks) > SHOWN else "")


def _key(rank: int) -> str:
    return f"dsplan/progress/{rank}"


def _count_collectives() -> int:
    total = 0
    for group in list(dist.distributed_c10d._world.pg_map):
        try:
            total += group._get_sequence_number_for_group()  # type: ignore[attr-defined]
        except RuntimeError:  # a backend that does not count
            continue
    return total


def _ends_without_a_word() -> bool:
    """NCCL's watchdog ends the process; gloo raises in the script."""
    return "nccl" in str(dist.get_backend_config())


def _line_of_script(frame: FrameType | None) -> str:
    """FILE:LINE of the innermost frame that is the script's own."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    while frame is not None:
        if frame.f_code.co_filename == script:
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


# --- the one of this process ---

_progress: Progress | None = None


def watch(limit: timedelta) -> Progress | None:
    """The progress of this process's group, told from now on. None where there is nobody to tell, or no common store."""
    global _progress
    group = dist.distributed_c10d._get_default_group()
    if _progress is not None and getattr(_progress, "group", None) is group:
        return _progress
    store: Any = dist.distributed_c10d._get_default_store()
    innermost = store
    while isinstance(innermost, PrefixStore):
        innermost = innermost.underlying_store
    if dist.get_world_size() == 1 or not isinstance(innermost, TCPStore):
        return None
    if _progress is None:
        atexit.register(_end, "has ended")
    _progress = Progress(store.clone(), dist.get_rank(), dist.get_world_size(), limit)
    _progress.group = group  # type: ignore[attr-defined]
    _progress.start()
    return _progress


def follow(engine: Any) -> None:
    """Let the progress of this process's group, if there is one, watch this engine's loop."""
    if _progress is not None:
        _progress.follow(engine)


def explain_failure(error: BaseException) -> str | None:
    """Who is to blame for a collective's failure; None where the error is none, or nobody knows."""
    if _progress is None or not is_of_collective(error):
        return None
    return _progress.explain(_line_of_traceback(error.__traceback__))


def is_of_collective(error: BaseException) -> bool:
    """Whether a collective failed: torch raises its own errors, and for gloo a RuntimeError that names the source file."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("gloo" in text or "NCCL" in text or "Timed out waiting" in text)


def end_with(error: BaseException) -> None:
    """The last word of a rank that fails."""
    _end(f"ended with {type(error).__name__}", _line_of_traceback(error.__traceback__))


def _end(doing: str, at: str = "") -> None:
    if _progress is not None:
        _progress.end(doing, at)


def _line_of_traceback(trace: TracebackType | None) -> str:
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    found = ""
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == script:
            found = f"{os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


@functools.cache
def chain_excepthook() -> None:
    """Without our launcher: a Problem is shown as one, by the script's line; a collective's failure is explained under the
    traceback that Python prints."""
    before = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        at = _line_of_traceback(trace)
        text = f"{at}: {error}" if at else str(error)
        if isinstance(error, Problem):
            print(error.user_traceback or "", end="", file=sys.stderr)
        else:
            before(kind, error, trace)
            text = explain_failure(error) or ""
        end_with(error)
        if text:
            print(f"dsplan: error: {text}", file=sys.stderr, flush=True)

    sys.excepthook = show


def leave_word(text: str) -> None:
    """Under a launch: what the launcher tells should this rank end without another word."""
    from dsplan.runtime.launching.orders import current_orders, record_failure

    orders = current_orders()
    if orders is not None:
        record_failure(orders, "", explanation=text)
