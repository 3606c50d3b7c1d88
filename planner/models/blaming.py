"""The user's code: run with its prints on stderr, and what it raises told by its own file and line, never by ours."""

from __future__ import annotations

import contextlib
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dsplan.planner.models.short_tables import short_table
from dsplan.schemas.problem import Problem


@contextlib.contextmanager
def user_code(path: Path | None, what: str, blind: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Run the user's code: what it prints goes to stderr, what it raises becomes a Problem that names file and line.

    blind: as of as_problem. The code finds its neighbours as under `python FILE`, and gets the cpu where it asks for a GPU.
    """
    from dsplan.planner.capturing.gpuless import without_gpu

    try:
        with contextlib.redirect_stdout(sys.stderr), _neighbours(path), without_gpu():
            yield
    except Problem:
        raise
    except (Exception, SystemExit) as error:
        raise as_problem(error, path or Path("the model"), what, blind=blind()) from error


@contextlib.contextmanager
def _neighbours(path: Path | None) -> Iterator[None]:
    if path is None or path.suffix != ".py":
        yield
        return
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)


def as_problem(error: BaseException, path: Path, what: str, *, blind: bool = False, script: bool = False) -> Problem:
    """What the user's code raised, as "model.py:9: the model raised ...", or what tensors without values cannot do.

    blind: other values than the data's own have been read before.
    """
    where, text = blame(error, path)
    running = what.startswith(("the model", "the script", "loss"))
    state_bytes = "leave out sample_batch for state bytes alone"
    if script or path.suffix != ".py":
        state_bytes = "give a model file with build_model() and no sample_batch for state bytes alone"
    if isinstance(error, ModuleNotFoundError) and error.name and not running:
        return Problem(
            f"{where}: imports {error.name}, which is not installed here; install it (pip), or import it only where it is used",
            user_traceback=None,
        )
    lack = _lacking(error, running, state_bytes)
    if lack is not None:
        _, text = blame(error, path, to_the_end=False)
        return Problem(f"{where}: {_place(error, path)}{lack}", user_traceback=text)
    remedy = "correct it and run again"
    if running and (short := short_table(error)) is not None:
        remedy = short
    elif blind:
        remedy = (
            "a tensor's value was read before (.item(), .tolist(), if tensor: ...), for which 1.0, 0 or False stood, since "
            f"dsplan runs the model on tensors without values; if it is that, give the model a way without it, or {state_bytes}"
        )
    inside = f", in {_place(error, path).strip()}" if running and where == str(path) and not script else ""
    return Problem(f"{where}: {what} {reason(error)}{inside}; {remedy}", user_traceback=text)


def reason(error: BaseException) -> str:
    """An exception in one line: "ValueError: heads must divide width"."""
    text = " ".join(str(error).split()).rstrip(".:")
    return f"{type(error).__name__}: {textwrap.shorten(text, 300) or 'no message'}"


def blame(error: BaseException, path: Path, *, to_the_end: bool = True) -> tuple[str, str | None]:
    """("file:line", the traceback from the user's first frame to where our instruments begin, without frames of ours).

    to_the_end: with what the user's last line called.
    Without a frame of the user's file the place is the file, and there is no traceback where all frames are ours.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [index for index, frame in enumerate(frames) if _is_of(frame.filename, path)]
    ours = [index for index, frame in enumerate(frames) if _is_ours(frame.filename)]
    theirs = [index for index in range(len(frames)) if index not in ours]
    first = own[0] if own else theirs[0] if theirs else len(frames)
    last = next((index for index in ours if index > (own[-1] if own else first)), len(frames))
    if own and not to_the_end:
        last = own[-1] + 1
    shown = [frames[index] for index in theirs if first <= index < last]
    text = None
    if shown:
        lines = ["Traceback (most recent call last):\n", *traceback.format_list(shown)]
        text = "".join(lines + traceback.format_exception_only(type(error), error))
    return f"{path}:{frames[own[-1]].lineno}" if own else str(path), text


def _is_of(filename: str, path: Path) -> bool:
    return Path(filename).resolve() == path.resolve()


_HOUSE = Path(__file__).resolve().parents[2]
_ROOMS = tuple(_HOUSE / room for room in ("planner", "runtime", "schemas", "reports"))


def _is_ours(filename: str) -> bool:
    if filename == contextlib.__file__ or filename.startswith("<frozen "):
        return True
    return any(room in Path(filename).resolve().parents for room in _ROOMS)


def _place(error: BaseException, path: Path) -> str:
    """The user's module in whose forward it happened: "Net.forward "; where none of the user's is, the library's."""
    walked = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = [frame for frame in walked if _is_of(frame.f_code.co_filename, path)]
    for frame in reversed(own or walked):
        holder = frame.f_locals.get(next(iter(frame.f_code.co_varnames), ""))
        if _is_torch_module(holder) and "call_impl" not in frame.f_code.co_name:
            return f"{type(holder).__name__}.{frame.f_code.co_name} "
    return f"{own[-1].f_code.co_name}() " if own and own[-1].f_code.co_name != "<module>" else "it "


def _is_torch_module(value: Any) -> bool:
    from torch import nn

    return isinstance(value, nn.Module)


def _lacking(error: BaseException, running: bool, state_bytes: str) -> str | None:
    """What met the end of tensors without values, and the way round; None for every other error.

    Source: torch/_subclasses/fake_tensor.py (the exceptions) and c10/core/TensorImpl (the messages of meta tensors).
    """
    from torch._subclasses import fake_tensor

    text = " ".join(str(error).split()).rstrip(".")
    way = f"give the model a way without it, or {state_bytes}"
    without = "but dsplan runs the model on tensors without values"
    if isinstance(error, fake_tensor.DynamicOutputShapeException):
        return (
            f"makes a tensor whose shape depends on the values of the data ({_operator(text)}), {without}; {way} (a way "
            "without: multiply by a mask, torch.where, sequences of full length)"
        )
    if isinstance(error, (fake_tensor.DataDependentOutputException, fake_tensor.UnsupportedFakeTensorException)):
        return f"needs the values of a tensor on the host ({_operator(text)}), {without}; {way}"
    if isinstance(error, fake_tensor.UnsupportedOperatorException):
        return _unknown_operator(_operator(text), without, way)
    if "no fake impl registered" in text:
        return _unknown_operator(text.partition("(")[2].partition(")")[0] or "an operator", without, way)
    if "Storage size calculation overflowed" in text:
        return "makes a tensor of more than 2**63 bytes; feed fewer samples or shorter ones (--micro-batch, --seq-len)"
    if isinstance(error, MemoryError) or "can't allocate memory" in text:
        return (
            f"makes a tensor larger than this host's free memory ({text[-120:]}); leave out device= and make it by torch or its "
            "modules (torch.empty, nn.Linear), which dsplan puts on device meta, where they cost nothing"
        )
    if "Torch not compiled with" in text or ("Could not run 'aten::" in text and "from the 'Meta'" not in text):
        return (
            f"asks for a device that torch does not know here ({text[:80]}); leave out device=, or ask for cpu or cuda: dsplan "
            "puts what the model and sample_batch make where it belongs"
        )
    if not isinstance(error, (RuntimeError, NotImplementedError, TypeError)):
        return None
    if "from the 'Meta' backend" in text:
        return _unknown_operator(text.partition("'")[2].partition("'")[0], without, way)
    if not any(part in text for part in _NO_VALUES):
        return None
    if running:
        return f"needs the values of a tensor on the host ({text[:120]}), {without}; {way}"
    return (
        f"reads the values of a parameter while it is built ({text[:120]}), but dsplan builds the model without weights; take "
        "them from a plain number, a plain tensor or an argument"
    )


def _unknown_operator(name: str, without: str, way: str) -> str:
    remedy = way
    if not name.startswith("aten"):
        qualified = name if "::" in name else name.replace(".", "::", 1)
        remedy = f'tell the shapes it returns with @torch.library.register_fake("{qualified}") (and register_autograd), {way}'
    return f"calls {name}, for which torch has no form without values, {without}; {remedy}"


_NO_VALUES = (
    "cannot be called on meta tensors",
    "Cannot copy out of meta tensor",
    ".numpy() is not supported for tensor subclasses",
    "can't convert meta device type tensor to numpy",
    "Cannot access data pointer of Tensor",
)


def _operator(text: str) -> str:
    return text.partition(" ")[0].removesuffix(".default") or "an operator"
