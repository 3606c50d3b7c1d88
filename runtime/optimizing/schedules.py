"""Learning-rate schedules of the JSON: DeepSpeed's five, and torch's by their class names.

Source: deepspeed/runtime/lr_schedules.py (0.19.8). A schedule moves after each step that was not skipped, so that the
first two steps of a warm-up run at its start. tests/oracle/learning_rates.json holds what DeepSpeed answers, to the bit.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from dsplan.runtime.groups import note
from dsplan.runtime.optimizing.courses import COURSES, Betas, Course
from dsplan.runtime.optimizing.kinds import wrong_kinds
from dsplan.schemas import native_support
from dsplan.schemas.config import Named
from dsplan.schemas.problem import Problem
from torch import nn
from torch.optim import Optimizer, lr_scheduler


class Schedule:
    """Sets lr of every group, and the betas where they cycle too, from the number of the last step; -1 before the first.

    DeepSpeed's methods. As there, a state that is loaded says where the schedule is, and changes no group: what these hold
    comes back with the optimizer.
    """

    def __init__(self, optimizer: Optimizer, course: Course, last_batch_iteration: int = -1):
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        self._course = course
        if last_batch_iteration == -1:
            self._set_lr(course.lr_at(-1))
            self._set_betas(course.first_betas)
        self._last_lr = [group["lr"] for group in optimizer.param_groups]

    def step(self, last_batch_iteration: int | None = None) -> None:
        following = self.last_batch_iteration + 1
        self.last_batch_iteration = following if last_batch_iteration is None else last_batch_iteration
        self._set_lr(self.get_lr())
        self._set_betas(self.get_mom())
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def get_lr(self) -> list[float]:
        return self._course.lr_at(self.last_batch_iteration)

    def get_last_lr(self) -> list[float]:
        """What the last step set."""
        return self._last_lr

    def get_mom(self) -> list[Betas] | None:
        """The betas of each group; None where they do not cycle."""
        return self._course.betas_at(self.last_batch_iteration) if self._course.betas_at is not None else None

    def state_dict(self) -> dict[str, int]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.last_batch_iteration = state["last_batch_iteration"]

    def _set_lr(self, lrs: Sequence[float]) -> None:
        for group, lr in zip(self.optimizer.param_groups, lrs, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def _set_betas(self, betas: Sequence[Betas] | None) -> None:
        for group, pair in zip(self.optimizer.param_groups, betas or (), strict=betas is not None):
            group["betas"] = pair


def build_schedule(named: Named, optimizer: Optimizer) -> Any:
    """The schedule that the JSON names, bound to the optimizer. Problem for an unknown name, parameter or value."""
    params = dict(named.params)
    try:
        if named.type in COURSES:
            last = params.pop("last_batch_iteration", -1)
            groups = optimizer.param_groups
            has_betas = "betas" in optimizer.defaults
            if named.type == "OneCycle" and params.get("cycle_momentum", True) and not has_betas:
                note(f"OneCycle moves no momentum: {type(optimizer).__name__} has no betas")
                params["cycle_momentum"] = False
            course = COURSES[named.type]([float(group["lr"]) for group in groups], **params)
            return Schedule(optimizer, course, last)
        if named.type in native_support.TORCH_SCHEDULERS:
            return getattr(lr_scheduler, named.type)(optimizer, **params)
    except (TypeError, ValueError, KeyError) as error:
        raise Problem(f"scheduler.params: {named.type} does not take these ({error})") from error
    raise Problem(
        f"scheduler.type {named.type} is not carried out by the native engine; use {', '.join(native_support.SCHEDULERS)}"
    )


def bound_schedule(given: Any, optimizer: Optimizer | None, named: Named | None) -> Any:
    """The script's schedule, or function that makes one, before the JSON's; None where there is neither or no optimizer.

    Problem where the script's moves the learning rates of another optimizer than the engine's.
    """
    if given is None:
        return build_schedule(named, optimizer) if named is not None and optimizer is not None else None
    schedule = given if is_schedule(given) else given(optimizer)
    moves = getattr(schedule, "optimizer", optimizer)
    if isinstance(moves, Optimizer) and moves is not optimizer:
        raise Problem(
            f"lr_scheduler {type(schedule).__name__} moves the learning rates of another optimizer than the engine's; pass "
            "that optimizer to initialize too, or pass a function of the optimizer as lr_scheduler"
        )
    return schedule


def advance(schedule: Any, arguments: Mapping[str, Any]) -> None:
    """One step of any schedule. Problem where it needs to be told something that engine.step was not given."""
    if not arguments and isinstance(schedule, lr_scheduler.ReduceLROnPlateau):
        raise Problem(
            'ReduceLROnPlateau needs to know how well it goes: call engine.step(lr_kwargs={"metrics": loss}), or step it '
            "yourself and do not hand it to initialize"
        )
    schedule.step(**arguments)


def wrong_params(named: Named, *, whole: bool) -> list[str]:
    """Every parameter that the schedule does not take, is of a wrong kind or, where params is whole, lacks; else the first
    wrong value."""
    maker: Callable[..., Any] | None = COURSES.get(named.type)
    if maker is None and named.type in native_support.TORCH_SCHEDULERS:
        maker = getattr(lr_scheduler, named.type)
    if maker is None:  # native_support says so
        return []
    known = dict(inspect.signature(maker).parameters)
    known.pop("lrs", None), known.pop("optimizer", None)
    unknown = [key for key in named.params if key not in known and key != "last_batch_iteration"]
    absent = [key for key, value in known.items() if value.default is value.empty and key not in named.params]
    found = [f"{named.type} does not take {', '.join(unknown)}"] if unknown else []
    found += [f"{named.type} needs {', '.join(absent)}"] if absent and whole else []
    wrong = wrong_kinds(maker, named.params)
    last = named.params.get("last_batch_iteration", -1)
    if "last_batch_iteration" not in known and type(last) is not int:
        wrong.append(f"last_batch_iteration is {last!r}, but must be a whole number")
    found += [f"{named.type}: {', '.join(wrong)}"] if wrong else []
    if found or absent or "auto" in [value for value in named.params.values() if isinstance(value, str)]:
        return found
    groups = max((len(value) for value in named.params.values() if isinstance(value, list)), default=1)
    if named.type == "MultiStepLR":
        groups = 1
    optimizer = torch.optim.Adam([{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(groups)], lr=1e-3)
    try:
        made = build_schedule(named, optimizer)
        optimizer.step()
        made.step()
    except (Problem, ArithmeticError) as problem:
        text = str(problem).removeprefix("scheduler.params: ")
        return [text if isinstance(problem, Problem) else f"{named.type} does not take these ({text})"]
    return []


def is_schedule(value: Any) -> bool:
    """Whether the value is a scheduler (and not a function that makes one)."""
    return hasattr(value, "step") and hasattr(value, "state_dict")
