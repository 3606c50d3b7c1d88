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
from typing import Any

from dsplan.planner.launch_counts import (
    Count,
    Environment,
    Options,
    deepspeed_count,
    srun_count,
    torchrun_count,
    visible_devices,
    whole,
)
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
    words = _words(words, environment)
    assigned: dict[str, str] = {}
    while words and (match := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", words[0], re.S)):
        assigned[match[1]] = match[2]
        words = words[1:]
    if not words:
        raise Problem("the line has no command; write dsplan check -- torchrun train.py ...")
    line = LaunchLine(words=tuple(words), environment=assigned)
    return _step(line, list(words), {**environment, **assigned})


def _words(words: Sequence[str], environment: Environment) -> list[str]:
    if len(words) != 1 or not re.search(r"\s", words[0]):
        return list(words)
    try:
        lexer = shlex.shlex(words[0], posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        parts = list(lexer)
    except ValueError as error:
        raise Problem(f"the line cannot be read ({str(error).lower()})") from error
    operators = [part for part in parts if part and set(part) <= set("();<>|&")]
    if operators:
        raise Problem(f"the line holds the shell's {operators[0]!r}; give one command alone")
    expanded = [re.sub(r"\$\{?(\w+)\}?", lambda name: environment.get(name[1], ""), part) for part in parts]
    return [word for word, part in zip(expanded, parts, strict=True) if word or not part.startswith("$")]


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
    if name.endswith(".sh") or name in ("bash", "sh", "make", "sbatch", "docker", "kubectl", "ssh"):
        raise Problem(f"{words[0]} hides the line that starts the training; put dsplan check before that line")
    known = "torchrun, deepspeed, accelerate launch, srun, mpirun, python, llamafactory-cli and axolotl"
    raise Problem(f"{words[0]!r} is no launcher that check knows; it knows {known}")


def options_of(
    words: Sequence[str], flags: frozenset[str] | set[str], pairs: frozenset[str] | set[str] = frozenset()
) -> tuple[dict[str, Any], list[str]]:
    """The options before the first word that is none, and what follows. Names without dashes, "-" as "_".

    flags take no value, pairs take two; all others take one.
    """
    options: dict[str, Any] = {}
    index = 0
    while index < len(words):
        word = words[index]
        if word == "--":
            index += 1
            break
        if not word.startswith("-") or len(word) == 1:
            break
        index += 1
        short = re.fullmatch(r"-([A-Za-z])=?(\d+)", word)
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if short:
            options[short[1]] = short[2]
        elif equals:
            options[name] = value
        elif name in flags:
            options[name] = True
        elif name in pairs:
            index += 2
        elif index < len(words):
            options[name] = words[index]
            index += 1
    return options, list(words[index:])


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


_TORCHRUN_FLAGS = frozenset(
    {"standalone", "m", "module", "no_python", "run_path", "use_env", "use_libuv", "virtual_local_rank", "h", "help"}
)


def _torchrun(line: LaunchLine, words: list[str], environment: Environment) -> LaunchLine:
    options, rest = options_of(words, _TORCHRUN_FLAGS)
    line = _launched(line, "torchrun", torchrun_count(options, environment))
    return _module(line, rest, environment) if {"m", "module"} & options.keys() and rest else _script(line, rest)


_DEEPSPEED_FLAGS = frozenset(
    {
        "no_python",
        "no_local_rank",
        "no_ssh",
        "no_ssh_check",
        "force_multi",
        "module",
        "bind_cores_to_rank",
        "save_pid",
        "elastic_training",
        "h",
        "help",
    }
)


def _deepspeed(line: LaunchLine, words: list[str], environment: Environment) -> LaunchLine:
    options, rest = options_of(words, _DEEPSPEED_FLAGS)
    line = _launched(line, "deepspeed", deepspeed_count(options, environment))
    return _module(line, rest, environment) if "module" in options and rest else _script(line, rest)


_ACCELERATE_FLAGS = frozenset(
    {
        "multi_gpu",
        "cpu",
        "tpu",
        "ipex",
        "use_xpu",
        "use_deepspeed",
        "use_fsdp",
        "use_megatron_lm",
        "use_parallelism_config",
        "use_mps_device",
        "tpu_use_cluster",
        "no_tpu_cluster",
        "tpu_use_sudo",
        "same_network",
        "m",
        "module",
        "no_python",
        "q",
        "quiet",
        "debug",
        "enable_cpu_affinity",
        "dynamo_use_fullgraph",
        "dynamo_use_dynamic",
        "dynamo_use_regional_compilation",
        "h",
        "help",
    }
)


def _accelerate(line: LaunchLine, words: list[str], environment: Environment) -> LaunchLine:
    if not words or words[0] != "launch":
        raise Problem("accelerate starts a training by accelerate launch only")
    return _accelerate_launch(line, words[1:], environment)


def _accelerate_launch(line: LaunchLine, words: list[str], environment: Environment) -> LaunchLine:
    options, rest = options_of(words, _ACCELERATE_FLAGS)
    count = Count(
        ranks=None, nodes=whole(options, "num_machines") or 1, why="accelerate launch without --num_processes"
    )
    ranks = whole(options, "num_processes", "n")
    if ranks is not None:
        count = replace(count, ranks=ranks, why=f"--num_processes {ranks}")
    line = replace(_launched(line, "accelerate launch", count), accelerate=options)
    return _module(line, rest, environment) if {"m", "module"} & options.keys() and rest else _script(line, rest)


_SRUN_FLAGS = frozenset({"u", "l", "K", "v", "Q", "X", "k", "O", "s", "unbuffered", "label", "pty", "exclusive"}) | {
    "overlap",
    "no_kill",
    "overcommit",
    "oversubscribe",
    "kill_on_bad_exit",
    "quiet",
    "verbose",
    "exact",
    "test_only",
    "wait_all_nodes",
    "propagate",
    "contiguous",
    "spread_job",
}


def _srun(line: LaunchLine, words: list[str], environment: Environment) -> LaunchLine:
    options, rest = options_of(words, _SRUN_FLAGS)
    count = srun_count(options, environment)
    return _step(_launched(line, "srun", count), rest, environment)


_MPIRUN_FLAGS = frozenset(
    {
        "allow_run_as_root",
        "oversubscribe",
        "report_bindings",
        "display_map",
        "tag_output",
        "v",
        "verbose",
        "q",
        "quiet",
        "l",
        "prepend_rank",
        "bind_to_none",
        "nolocal",
        "nooversubscribe",
    }
)


def _mpirun(line: LaunchLine, words: list[str], environment: Environment) -> LaunchLine:
    options, rest = options_of(words, _MPIRUN_FLAGS, {"mca", "gmca", "genv", "env"})
    ranks = whole(options, "np", "n", "c")
    per_node = whole(options, "N", "npernode", "ppn")
    nodes = ranks // per_node if ranks and per_node and ranks % per_node == 0 else 1
    why = f"mpirun -np {ranks}" if ranks else "mpirun without -np"
    return _step(_launched(line, "mpirun", Count(ranks=ranks, nodes=nodes, why=why)), rest, environment)


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
        count = torchrun_count(options_of(launcher, _TORCHRUN_FLAGS)[0], environment)
    elif whole(options_of(launcher, _ACCELERATE_FLAGS)[0], "num_processes") is not None:
        ranks = whole(options_of(launcher, _ACCELERATE_FLAGS)[0], "num_processes")
        count = Count(ranks=ranks, why=f"--num_processes {ranks}")
    elif visible_devices(environment) is not None:
        count = Count(ranks=visible_devices(environment), why="CUDA_VISIBLE_DEVICES")
    return replace(_launched(line, "axolotl", count), program="axolotl", arguments=tuple(own))


def _env(line: LaunchLine, words: list[str], environment: Environment) -> LaunchLine:
    """env A=1 command."""
    assigned: dict[str, str] = {}
    while words and "=" in words[0] and not words[0].startswith("-"):
        name, _, value = words[0].partition("=")
        assigned[name] = value
        words = words[1:]
    return _step(line, words, {**environment, **assigned})


def _wrapper(skip: int) -> Callable[[LaunchLine, list[str], Environment], LaunchLine]:
    """What only stands before a command: nohup, time; uv run and poetry run skip a word."""

    def read(line: LaunchLine, words: list[str], environment: Environment) -> LaunchLine:
        rest = words[skip:]
        while rest and rest[0].startswith("-"):
            rest = rest[1:]
        return _step(line, rest, environment)

    return read


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
    "env": _env,
    "nohup": _wrapper(0),
    "time": _wrapper(0),
    "uv": _wrapper(1),
    "poetry": _wrapper(1),
}
_MODULES: dict[str, Reader] = {
    "torch.distributed.run": _torchrun,
    "torch.distributed.launch": _torchrun,
    "deepspeed.launcher.runner": _deepspeed,
    "deepspeed": _deepspeed,
    "accelerate.commands.launch": _accelerate_launch,
    "llamafactory.cli": _llama_factory,
}
