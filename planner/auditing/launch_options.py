"""The options of launchers: which take no value, and how a line's are read.

Sources: torch/distributed/run.py, deepspeed/launcher/runner.py, accelerate/commands/launch.py; the manuals of srun and mpirun.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from dsplan.planner.auditing.shell_text import is_open
from dsplan.schemas.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Sequence

TORCHRUN_FLAGS = frozenset(
    {"standalone", "m", "module", "no_python", "run_path", "use_env", "use_libuv", "virtual_local_rank", "h", "help"}
)

DEEPSPEED_FLAGS = frozenset(
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

ACCELERATE_FLAGS = frozenset(
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

SRUN_FLAGS = frozenset(
    {"u", "l", "K", "v", "Q", "X", "k", "O", "s", "E", "H", "Z", "unbuffered", "label", "pty", "exclusive"}
) | {
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
    "hold",
    "immediate",
    "multi_prog",
    "nvmps",
    "preserve_env",
    "quit_on_interrupt",
    "disable_status",
    "reboot",
    "use_min_nodes",
    "whole",
    "x11",
    "send_libs",
    "bcast",
}

MPIRUN_FLAGS = frozenset(
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


def options_of(
    words: Sequence[str],
    flags: frozenset[str] | set[str],
    pairs: frozenset[str] | set[str] = frozenset(),
    *,
    joined: bool = False,
) -> tuple[dict[str, Any], list[str]]:
    """The options before the first word that is none, and what follows. Names without dashes, "-" as "_".

    flags take no value, pairs take two; all others take one. joined: what follows a single letter is its value, or more of them.
    """
    options: dict[str, Any] = {}
    words, index = list(words), 0
    while index < len(words):
        word = words[index]
        if is_open(word):
            raise Problem(f"the line holds {word}, which is not set here; set it, or write what it holds")
        if word == "--":
            index += 1
            break
        if not word.startswith("-") or len(word) == 1:
            break
        index += 1
        if joined and re.fullmatch(r"-[A-Za-z].+", word) and word[1] in flags and not re.match(r"-K\d", word):
            options[word[1]] = True
            index -= 1
            words[index] = f"-{word[2:]}"
            continue
        short = re.fullmatch(r"-([A-Za-z])=?(.+)" if joined else r"-([A-Za-z])=?(\d+)", word)
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
    return options, words[index:]
