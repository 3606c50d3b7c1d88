"""Stage 3 without memory_efficient_linear: weights that autograd keeps whole after they were let go of.

torch.nn.functional.linear saves `weight.t()` for backward, a view with a storage of its own life: emptying the parameter
does not free it. DeepSpeed's zero3_linear_wrap saves the parameter itself. Source: deepspeed/runtime/zero/linear.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsplan.planner.memory.deepspeed.beats import ENTER, GRAD, LEAVE, Beats, after_blocks
from dsplan.schemas.trace import Trace


@dataclass(frozen=True, slots=True)
class Saved:
    """One weight, saved by the module that is entered at mark `begin`, needed until mark `end`."""

    param: int
    begin: int
    end: int


def saved_weights(trace: Trace, beats: Beats) -> tuple[Saved, ...]:
    """By weight the last forward before its gradient; where blocks are recomputed, that is the recomputation."""
    entered: dict[int, list[int]] = {}
    ends: dict[int, int] = {}
    for mark, (kind, what) in enumerate(beats.marks):
        if kind == ENTER:
            for param in beats.module_params[what]:
                entered.setdefault(param, []).append(mark)
        elif kind == GRAD:
            ends[what] = mark
        elif kind == LEAVE:
            for param in beats.module_params[what]:
                if not beats.params[param].trainable:
                    ends[param] = mark
    candidates = linear_weights(trace, beats)
    backward = {param: [mark for mark in entered.get(param, ()) if beats.backward[mark]] for param in candidates}
    recomputed = 2 * sum(len(marks) > 1 for marks in backward.values()) > len(candidates)
    found = []
    for param in candidates:
        if recomputed:
            before = backward[param][:-1]
        else:
            before = [mark for mark in entered.get(param, ()) if not beats.backward[mark]]
        if before and ends.get(param, -1) > before[-1]:
            found.append(Saved(param, before[-1], ends[param]))
    return tuple(found)


def linear_weights(trace: Trace, beats: Beats) -> list[int]:
    """Places of the weights of linear layers, told by their shapes: two dims, a bias as long as the first.

    Embeddings save nothing: what is used before the blocks alone, or before the first norm where no blocks were found,
    counts as such.
    """
    params = beats.params
    if trace.blocks:
        later = {param.name for unit in trace.units if unit.name for param in unit.params} | after_blocks(trace)
    else:
        later = _after_first_norm(beats)
    biases = {param.name: param.shape for param in params}
    found = []
    for place, param in enumerate(params):
        name, _, last = param.name.rpartition(".")
        bias = biases.get(f"{name}.bias", param.shape[:1])
        if len(param.shape) == 2 and last == "weight" and bias == param.shape[:1] and param.name in later:
            found.append(place)
    return found


def _after_first_norm(beats: Beats) -> set[str]:
    """Names of the parameters that a module uses which is entered after the first one whose parameters are all vectors."""
    entered = [beats.module_params[what] for kind, what in beats.marks if kind == ENTER]
    norms = (
        index for index, held in enumerate(entered) if held and all(len(beats.params[at].shape) < 2 for at in held)
    )
    first = next(norms, -1)
    return {beats.params[place].name for held in entered[first + 1 :] for place in held}
