"""Engine deepspeed rehearsed by the DeepSpeed that is installed, in a child process of its own -> a Rehearsal.

DeepSpeed changes torch where it is imported, and takes its accelerator from the environment: so it never enters this process.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsplan.planner.capturing.capture import ScriptSubject
from dsplan.planner.models.load import ModelSubject, Subject
from dsplan.planner.rehearsing.rehearsal import Rehearsal
from dsplan.planner.rehearsing.scripts import rehearse_script
from dsplan.schemas.plan import Plan
from dsplan.schemas.problem import Problem

STANDS = "; the formula stands"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the child is asked: the plan, and how it gets the model. config: the user's own DeepSpeed configuration."""

    load: dict[str, Any]
    """Arguments of load_subject."""
    plan: Plan
    config: dict[str, Any] | None


def rehearse(subject: Subject, plan: Plan, config: Mapping[str, Any] | None = None) -> Rehearsal:
    """Rank 0 over the third step of DeepSpeed's engine under this plan, without weights, GPU or network.

    config: the user's own configuration, of which all counts but what the plan decides. Problem, in one line, where DeepSpeed
    is not installed or does not carry the plan out.
    """
    refuse(subject, plan)
    if importlib.util.find_spec("deepspeed") is None:
        raise Problem(f"DeepSpeed is not installed: `pip install 'dsplan[deepspeed]'` rehearses it{STANDS}")
    if isinstance(subject, ScriptSubject):
        return rehearse_script(subject, plan, config)
    if subject.arguments is None:
        raise Problem(f"{subject.source} was not loaded from a file, so that no other process can{STANDS}")
    request = Request(load=subject.arguments, plan=plan, config=dict(config) if config is not None else None)
    answer = _child_for(subject.arguments).ask(request)
    if isinstance(answer, str):
        raise Problem(answer)
    return answer


def refuse(subject: Subject, plan: Plan) -> None:
    """Problem for what no rehearsal of DeepSpeed covers."""
    if isinstance(subject, ModelSubject) and subject.sample_batch is None:
        raise Problem(
            f"{subject.source}: rehearsal needs a batch; add sample_batch(micro_batch, seq_len) to the model file"
        )
    for name in ("tp", "pp", "sp", "dp_replicate"):
        if getattr(plan.layout, name) > 1:
            raise Problem(
                f"rehearsal of deepspeed with {name} {getattr(plan.layout, name)} is not available yet{STANDS}"
            )
    if plan.knobs.nvme_optimizer or plan.knobs.nvme_params:
        raise Problem(f"rehearsal of deepspeed with offload to nvme is not available yet{STANDS}")


class _Child:
    """A Python of ours with DeepSpeed in it, which answers requests about one model one after another."""

    def __init__(self) -> None:
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONUNBUFFERED": "1"}
        environment.pop("PYTHONWARNINGS", None)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dsplan.planner.rehearsing.deepspeed_child", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        atexit.register(self.end)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: Request) -> Rehearsal | str:
        """What the engine told, or the one line that says why it could not."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            pickle.dump(request, self._process.stdin)
            self._process.stdin.flush()
            answer = pickle.load(self._process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            code = self._process.wait()
            return f"the process that rehearsed DeepSpeed ended with code {code}{STANDS}"
        assert isinstance(answer, (Rehearsal, str))
        return answer

    def end(self) -> None:
        if self.alive:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        atexit.unregister(self.end)


_children: dict[str, _Child] = {}
"""At most one, by the model that it has loaded: rows of one report follow each other."""


def _child_for(load: Mapping[str, Any]) -> _Child:
    key = repr(sorted(load.items(), key=lambda item: item[0]))
    if key not in _children or not _children[key].alive:
        end_children()
        _children[key] = _Child()
    return _children[key]


def end_children() -> None:
    """Let go of the process that was kept for a next rehearsal."""
    while _children:
        _children.popitem()[1].end()
