"""What only stands before a launcher: nohup, env, numactl, uv run, conda run, apptainer exec and the like.

Sources: the manuals of these programs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsplan.schemas.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapper:
    """How the words of one are passed over. takes: its options with a value behind them; None: all that have no "="."""

    takes: frozenset[str] | None = frozenset()
    command: str = ""
    """The word that must follow, as run in uv run."""
    positional: int = 0
    """Words of its own before the command, as the time of timeout."""


def _takes(text: str) -> frozenset[str]:
    return frozenset(text.split())


_UV = _takes(
    "with with-editable with-requirements extra no-extra group no-group only-group python p package project directory "
    "env-file index index-url default-index extra-index-url i f find-links cache-dir config-file w P C upgrade-package "
    "refresh-package reinstall-package resolution prerelease link-mode python-platform exclude-newer color config-setting"
)
_CONTAINER = _takes(
    "B bind H home W workdir S scratch o overlay pwd cwd env env-file app security network network-args dns hostname mount "
    "add-caps drop-caps apply-cgroups fusemount"
)
WRAPPERS: Mapping[str, Wrapper] = {
    "nohup": Wrapper(),
    "setsid": Wrapper(),
    "command": Wrapper(),
    "exec": Wrapper(takes=_takes("a")),
    "time": Wrapper(takes=_takes("f format o output")),
    "nice": Wrapper(takes=_takes("n adjustment")),
    "ionice": Wrapper(takes=_takes("c n class classdata")),
    "timeout": Wrapper(takes=_takes("s k signal kill-after"), positional=1),
    "stdbuf": Wrapper(takes=_takes("i o e input output error")),
    "numactl": Wrapper(
        takes=_takes(
            "N m C i p P cpunodebind membind physcpubind interleave preferred preferred-many weighted-interleave"
        )
    ),
    "taskset": Wrapper(positional=1),
    "sudo": Wrapper(takes=_takes("u g h p C T R D user group host prompt chdir chroot")),
    "nsys": Wrapper(command="profile", takes=None),
    "uv": Wrapper(command="run", takes=_UV),
    "poetry": Wrapper(command="run", takes=_takes("C directory P project")),
    "pdm": Wrapper(command="run", takes=_takes("p project")),
    "pipenv": Wrapper(command="run", takes=_takes("python pypi-mirror")),
    "hatch": Wrapper(command="run", takes=_takes("e env p project")),
    "rye": Wrapper(command="run", takes=_takes("pyproject")),
    "pixi": Wrapper(command="run", takes=_takes("e environment manifest-path")),
    "conda": Wrapper(command="run", takes=_takes("n name p prefix cwd")),
    "mamba": Wrapper(command="run", takes=_takes("n name p prefix cwd")),
    "micromamba": Wrapper(command="run", takes=_takes("n name p prefix cwd")),
    "apptainer": Wrapper(command="exec", takes=_CONTAINER, positional=1),
    "singularity": Wrapper(command="exec", takes=_CONTAINER, positional=1),
}


def unwrapped(name: str, words: list[str]) -> list[str]:
    """The words behind a wrapper and its own. Problem where it is given another command than the one that runs something."""
    wrapper = WRAPPERS[name]
    rest = _behind_options(words, wrapper)
    if wrapper.command:
        if not rest or rest[0] != wrapper.command:
            raise Problem(f"{name} starts a training by {name} {wrapper.command} only")
        rest = _behind_options(rest[1:], wrapper)
    return rest[wrapper.positional :]


def _behind_options(words: list[str], wrapper: Wrapper) -> list[str]:
    index = 0
    while index < len(words) and words[index].startswith("-"):
        word = words[index]
        if word in ("-m", "--module") and wrapper.takes is not None and "m" not in wrapper.takes:
            break  # uv run -m package.module
        index += 1
        if word == "--":
            break
        takes = "=" not in word if wrapper.takes is None else word.lstrip("-") in wrapper.takes
        index += takes
    return words[index:]


def without_environment(words: list[str], environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """The command behind env, and the environment that it is given."""
    given = dict(environment)
    rest = list(words)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word in ("-", "-i", "--ignore-environment"):
            given = {}
        elif word in ("-u", "--unset", "-C", "--chdir"):
            value = rest.pop(0) if rest else ""
            if word in ("-u", "--unset"):
                given.pop(value, None)
        elif word.startswith("--unset="):
            given.pop(word.partition("=")[2], None)
        elif word.startswith(("-S", "--split-string")):
            raise Problem("env -S hides the line that starts the training; write its words one by one")
        elif word == "--":
            break
    while rest and "=" in rest[0]:
        name, _, given[name] = rest.pop(0).partition("=")
    return rest, given
