"""Reads the line that people start their training with: launcher, counts, script, configuration, arguments. Runs nothing.

Sources: torch/distributed/run.py, deepspeed/launcher/runner.py, accelerate/commands/launch.py, transformers/hf_argparser.py;
the manuals of srun and mpirun.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dsplan.planner.auditing.launch_counts import (
    Count,
    Environment,
    Options,
    deepspeed_count,
    mpirun_count,
    open_value,
    srun_count,
    torchrun_count,
    visible_devices,
    whole,
)
from dsplan.planner.auditing.launch_options import (
    ACCELERATE_FLAGS,
    DEEPSPEED_FLAGS,
    MPIRUN_FLAGS,
    SRUN_FLAGS,
    TORCHRUN_FLAGS,
    options_of,
)
from dsplan.planner.auditing.shell_text import is_open, shell_words
from dsplan.planner.auditing.wrappers import WRAPPERS, unwrapped, without_environment
from dsplan.schemas.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchLine:
    """A line in its parts. launchers: outermost first, without what only changes the environment."""

    words: tuple[str, ...]
    """What is run, without assignments before it."""
    environment: Mapping[str, str]
    """What the line itself assigns."""
    launchers: tuple[str, ...] = ()
    count: Count = field(default_factory=lambda: Count(ranks=1, why="no launcher, so one process"))
    accelerate: Options | None = None
    """Options of accelerate launch."""
    program: str = ""
    """The script, or the module behind -m."""
    arguments: tuple[str, ...] = ()


def read_line(words: Sequence[str], environment: Environment) -> LaunchLine:
    """A line, as words or as one quoted word. Problem where it is none that starts a training."""
    run: tuple[str, ...] | None = None
    if len(words) == 1 and re.search(r"\s", words[0]):
        text = words[0]
        words, shell = shell_words(text, environment)
        run = ("bash", "-c", text) if shell else None
    rest, given = _behind_assignments(list(words), {})
    assigned = dict(given)
    words = rest
    if not words:
        raise Problem("the line has no command; write dsplan check -- torchrun train.py ...")
    if run is None and words[0] in _BUILT_IN:
        run = ("bash", "-c", shlex.join(words))
    line = LaunchLine(words=run or tuple(words), environment=assigned)
    return _step(line, words, {**environment, **assigned})


def _step(line: LaunchLine, words: list[str], environment: Environment) -> LaunchLine:
    """One launcher off the front, and so on to the program."""
    if not words:
        last = line.launchers[-1] if line.launchers else "the line"
        raise Problem(f"{last} starts no script; write the whole line, as in dsplan check -- torchrun train.py ...")
    name = Path(words[0]).name
    if re.fullmatch(r"python[\d.]*|pypy\d*", name):
        return _python(line, words[1:], environment)
    reader = _LAUNCHERS.get(name)
    if reader is not None:
        return reader(line, words[1:], environment)
    if name.endswith(".py"):
        return replace(line, program=words[0], arguments=tuple(words[1:]))
    if name in WRAPPERS:
        rest = unwrapped(name, words[1:])
        module = rest[:1] in (["-m"], ["--module"]) and len(rest) > 1
        return _module(line, rest[1:], environment) if module else _step(line, rest, environment)
    if name in _SHELLS and (inner := _handed_to_shell(words[1:])) is not None:
        return _step(line, *_behind_assignments(shell_words(inner, environment)[0], environment))
    if is_open(words[0]):
        raise Problem(f"the line holds {words[0]}, which is not set here; set it, or write what it holds")
    if name.endswith(".sh") or name in (*_SHELLS, "make", "sbatch", "docker", "podman", "kubectl", "ssh"):
        raise Problem(f"{words[0]} hides the line that starts the training; put dsplan check before that line")
    known = "torchrun, deepspeed, accelerate launch, srun, mpirun, python, llamafactory-cli and axolotl"
    raise Problem(f"{words[0]!r} is no launcher that check knows; it knows {known}")


_BUILT_IN = ("exec", "command", "time")
"""Commands of the shell itself."""
_SHELLS = ("bash", "sh", "dash", "zsh")


def _handed_to_shell(words: list[str]) -> str | None:
    """The text of bash -c TEXT, also behind other options (-lc)."""
    for index, word in enumerate(words[:-1]):
        if not word.startswith("-"):
            return None
        if re.fullmatch(r"-[a-z]*c", word):
            return words[index + 1]
    return None


def _behind_assignments(words: list[str], environment: Environment) -> tuple[list[str], Environment]:
    given = dict(environment)
    while words and (match := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", words[0], re.S)):
        given[match[1]] = match[2]
        words = words[1:]
    return words, given


def _python(line: LaunchLine, words: list[str], environment: Environment) -> LaunchLine:
    options, rest = [], list(words)
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
        options.append(rest.pop(0))
        if options[-1] in ("-W", "-X") and rest:
            rest.pop(0)
    if rest and rest[0] == "-c":
        raise Problem("python -c starts no script that check could read")
    if not rest or rest == ["-m"]:
        raise Problem("python starts no script; write the whole line")
    variable = next((name for name in ("WORLD_SIZE", "SLURM_NTASKS") if whole(environment, name)), None)
    if not line.launchers and variable is not None:
        ranks = whole(environment, variable)
        line = replace(line, count=Count(ranks=ranks, why=f"{variable}={ranks} of the environment"))
    if rest[0] == "-m":
        return _module(line, rest[1:], environment)
    return replace(line, program=rest[0], arguments=tuple(rest[1:]))


def _module(line: LaunchLine, words: list[str], environment: Environment) -> LaunchLine:
    """What python -m runs: a launcher, or the program itself."""
    reader = _MODULES.get(words[0])
    if reader is not None:
        return reader(line, words[1:], environment)
    return replace(line, program=words[0], arguments=tuple(words[1:]))


def _torchrun(line: LaunchLine, words: list[str], environment: Environment) -> LaunchLine:
    options, rest = options_of(words, TORCHRUN_FLAGS)
    line = _launched(line, "torchrun", torchrun_count(options, environment))
    return _module(line, rest, environment) if {"m", "module"} & options.keys() and rest else _script(line, rest)


def _deepspeed(line: LaunchLine, words: list[str], environment: Environment) -> LaunchLine:
    options, rest = options_of(words, DEEPSPEED_FLAGS)
    line = _launched(line, "deepspeed", deepspeed_count(options, environment))
    return _module(line, rest, environment) if "module" in options and rest else _script(line, rest)


def _accelerate(line: LaunchLine, words: list[str], environment: Environment) -> LaunchLine:
    if not words or words[0] != "launch":
        raise Problem("accelerate starts a training by accelerate launch only")
    return _accelerate_launch(line, words[1:], environment)


def _accelerate_launch(line: LaunchLine, words: list[str], environment: Environment) -> LaunchLine:
    options, rest = options_of(words, ACCELERATE_FLAGS)
    count = Count(
        ranks=None, nodes=whole(options, "num_machines") or 1, why="accelerate launch without --num_processes"
    )
    ranks = whole(options, "num_processes", "n")
    if ranks is not None:
        count = replace(count, ranks=ranks, why=f"--num_processes {ranks}")
    elif (said := open_value(options, "num_processes", "n")) is not None:
        count = replace(count, why=f"--num_processes {said} is no number")
    line = replace(_launched(line, "accelerate launch", count), accelerate=options)
    return _module(line, rest, environment) if {"m", "module"} & options.keys() and rest else _script(line, rest)


def _srun(line: LaunchLine, words: list[str], environment: Environment) -> LaunchLine:
    options, rest = options_of(words, SRUN_FLAGS, joined=True)
    count = srun_count(options, environment)
    return _step(_launched(line, "srun", count), rest, environment)


def _mpirun(line: LaunchLine, words: list[str], environment: Environment) -> LaunchLine:
    options, rest = options_of(words, MPIRUN_FLAGS, {"mca", "gmca", "genv", "env"})
    return _step(_launched(line, "mpirun", mpirun_count(options)), rest, environment)


def _llama_factory(line: LaunchLine, words: list[str], environment: Environment) -> LaunchLine:
    if not words or words[0] != "train":
        raise Problem("llamafactory-cli starts a training by llamafactory-cli train only")
    per_node, nodes = whole(environment, "NPROC_PER_NODE"), whole(environment, "NNODES", "NUM_NODES") or 1
    visible = visible_devices(environment)
    if per_node is None and visible is None:
        count = Count(ranks=None, nodes=nodes, why="llamafactory-cli takes all GPUs: set NPROC_PER_NODE")
    elif per_node is not None:
        count = Count(ranks=nodes * per_node, nodes=nodes, why=f"NPROC_PER_NODE={per_node} on {nodes} node(s)")
    else:
        count = Count(ranks=nodes * (visible or 1), nodes=nodes, why="CUDA_VISIBLE_DEVICES")
    return replace(_launched(line, "llamafactory-cli", count), program="llamafactory-cli", arguments=tuple(words[1:]))


def _axolotl(line: LaunchLine, words: list[str], environment: Environment) -> LaunchLine:
    if not words or words[0] != "train":
        raise Problem("axolotl starts a training by axolotl train only")
    own, launcher = list(words[1:]), []
    if "--" in own:
        cut = own.index("--")
        own, launcher = own[:cut], own[cut + 1 :]
    count = Count(ranks=None, why="axolotl takes all GPUs of the machine")
    if "torchrun" in own:
        count = torchrun_count(options_of(launcher, TORCHRUN_FLAGS)[0], environment)
    elif whole(options_of(launcher, ACCELERATE_FLAGS)[0], "num_processes") is not None:
        ranks = whole(options_of(launcher, ACCELERATE_FLAGS)[0], "num_processes")
        count = Count(ranks=ranks, why=f"--num_processes {ranks}")
    elif visible_devices(environment) is not None:
        count = Count(ranks=visible_devices(environment), why="CUDA_VISIBLE_DEVICES")
    return replace(_launched(line, "axolotl", count), program="axolotl", arguments=tuple(own))


def _env(line: LaunchLine, words: list[str], environment: Environment) -> LaunchLine:
    """env A=1 command."""
    return _step(line, *without_environment(words, environment))


def _launched(line: LaunchLine, name: str, count: Count) -> LaunchLine:
    """The innermost launcher starts the ranks, so its count holds."""
    return replace(line, launchers=(*line.launchers, name), count=count)


def _script(line: LaunchLine, words: list[str]) -> LaunchLine:
    if not words:
        raise Problem(f"{line.launchers[-1]} starts no script; write the whole line")
    return replace(line, program=words[0], arguments=tuple(words[1:]))


Reader = Callable[[LaunchLine, list[str], Environment], LaunchLine]
_LAUNCHERS: dict[str, Reader] = {
    "torchrun": _torchrun,
    "deepspeed": _deepspeed,
    "deepspeed.pt": _deepspeed,
    "ds": _deepspeed,
    "accelerate": _accelerate,
    "accelerate-launch": _accelerate_launch,
    "srun": _srun,
    "mpirun": _mpirun,
    "mpiexec": _mpirun,
    "llamafactory-cli": _llama_factory,
    "axolotl": _axolotl,
    "mpiexec.hydra": _mpirun,
    "orterun": _mpirun,
    "env": _env,
}
_MODULES: dict[str, Reader] = {
    "torch.distributed.run": _torchrun,
    "torch.distributed.launch": _torchrun,
    "deepspeed.launcher.runner": _deepspeed,
    "deepspeed": _deepspeed,
    "accelerate.commands.launch": _accelerate_launch,
    "llamafactory.cli": _llama_factory,
}
