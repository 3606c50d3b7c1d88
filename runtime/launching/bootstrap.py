"""How every rank starts: dies with its launcher, finds the stand-in for deepspeed, runs the script as __main__.

python .../runtime/launching/bootstrap.py SCRIPT [ARGS...]

By its path, since -m would put the working folder first on the module path, and any json.py there before Python's own.
"""

from __future__ import annotations

import ctypes
import io
import os
import signal
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from dsplan.runtime.launching.orders import Orders, current_orders, record_failure
from dsplan.schemas.problem import Problem

PR_SET_PDEATHSIG = 1
REFUSED = 2


def main() -> None:
    orders = current_orders()
    if orders is None:
        raise SystemExit("dsplan: error: this module is started by dsplan launch, not by hand")
    die_with_parent(orders.launcher_pid)
    script, *arguments = sys.argv[1:]
    _write_whole_lines()
    try:
        _run_script(script, arguments)
        _finish(orders, script)
    except Problem as problem:
        _record_refusal(orders, problem)
        sys.exit(REFUSED)
    except SystemExit as stop:
        if stop.code in (None, 0):
            try:
                _finish(orders, script)
            except Problem as problem:
                _record_refusal(orders, problem)
                sys.exit(REFUSED)
        else:
            record_failure(orders, "")  # what there is to say the script has said
        raise
    except BaseException as error:
        explanation = _explanation(error)
        shown = _script_alone(error) if explanation else _traceback_of_script(error)
        record_failure(orders, shown, explanation=explanation)
        _write_record(orders)
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else 1)


def _write_whole_lines() -> None:
    """Each line leaves in one piece, also under python -u: the ranks share one terminal."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel for SIGKILL when the parent ends; end now where it already has."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:
            os._exit(1)


def _run_script(script: str, arguments: list[str]) -> None:
    """As `python SCRIPT ARGS` does: sys.argv, sys.path and a module __main__ that stays."""
    path = os.path.join(os.getcwd(), script)
    sys.argv = [script, *arguments]
    own = Path(__file__)
    if sys.path[0] == str(own.parent):
        del sys.path[0]
    sys.path.insert(0, str(own.with_name("stand_in")))
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, str(Path(path).resolve().parent))
    module = ModuleType("__main__")
    module.__dict__.update(__file__=path, __builtins__=__builtins__, __spec__=None)
    sys.modules["__main__"] = module
    exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), module.__dict__)


def _finish(orders: Orders, script: str) -> None:
    """The rank's record, once the script has ended well. Problem where it never made an engine."""
    initializing: Any = sys.modules.get("dsplan.runtime.initializing")
    meters = initializing.meters if initializing is not None else []
    if not meters:
        raise Problem(
            f"{script} ended without calling deepspeed.initialize or dsplan.runtime.initialize, so nothing was trained "
            f"under {orders.source}"
        )
    background: Any = sys.modules.get("dsplan.runtime.checkpoints.background")
    if background is not None:
        background.wait_for_all()
    _write_record(orders)
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _write_record(orders: Orders) -> None:
    """What this rank has measured, also where it fails."""
    initializing: Any = sys.modules.get("dsplan.runtime.initializing")
    for meter in initializing.meters[:1] if initializing is not None else ():
        meter.write(Path(orders.folder))


def _explanation(error: BaseException) -> str:
    """Which ranks a failed collective waited for; empty where that is not what failed."""
    progress: Any = sys.modules.get("dsplan.runtime.launching.progress")
    if progress is None:
        return ""
    text = progress.explain_failure(error)
    progress.end_with(error)
    return text or ""


def _record_refusal(orders: Orders, problem: Problem) -> None:
    record_failure(orders, str(problem), refused=True, cause=problem.user_traceback or "")


def _traceback_of_script(error: BaseException) -> str:
    """The traceback from the script's first frame on: ours above it explain nothing."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def _script_alone(error: BaseException) -> str:
    """The same without the frames of libraries: of a collective that failed, where the script was says all."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == script]
    words = "".join(traceback.format_exception_only(error))
    return f"Traceback (of the script alone):\n{''.join(traceback.format_list(frames))}{words}"


if __name__ == "__main__":
    main()
