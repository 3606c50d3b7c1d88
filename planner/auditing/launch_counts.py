"""How many GPUs a launcher starts, by its options and the environment. None where only the machine knows.

Sources: torch/distributed/run.py, deepspeed/launcher/runner.py, the manual of srun.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsplan.schemas.problem import Problem

Options = Mapping[str, Any]
Environment = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """GPUs of the job. ranks None: not known. why: what it was taken from."""

    ranks: int | None
    nodes: int = 1
    why: str = ""

    def __post_init__(self) -> None:
        if self.ranks is not None and self.ranks < 1:
            raise Problem(f"the line starts no process ({self.why})")


def whole(options: Mapping[str, Any], *names: str) -> int | None:
    """The number of the first option that is there and is one."""
    for name in names:
        value = str(options.get(name, ""))
        if value.isascii() and value.isdigit():
            return int(value)
    return None


def open_value(options: Mapping[str, Any], *names: str) -> str | None:
    """What the first option that is there says, where that is no number: a variable that is not set, a range of nodes."""
    value = next((str(options[name]) for name in names if name in options), None)
    return None if value is None or (value.isascii() and value.isdigit()) else value


def torchrun_count(options: Options, environment: Environment) -> Count:
    said: list[str] = []

    def value(name: str, other: str, default: str) -> str:
        for key in (name, other):
            if key in options:
                said.append(f"--{key} {options[key]}")
                return str(options[key])
        variable = f"PET_{name.upper()}"
        if variable in environment:
            said.append(f"{variable}={environment[variable]}")
            return environment[variable]
        said.append(f"--{name} {default} (the default)")
        return default

    nodes = "1" if "standalone" in options else value("nnodes", "nnodes", "1")
    low, _, high = nodes.partition(":")
    per_node = value("nproc_per_node", "nproc_per_node", "1")
    if high and high != low:
        return Count(ranks=None, why=f"--nnodes {nodes} leaves the number of nodes open")
    if per_node in ("gpu", "auto"):
        visible = visible_devices(environment)
        if visible is None:
            return Count(ranks=None, why=f"--nproc_per_node {per_node} depends on the machine")
        said[-1] += f" and CUDA_VISIBLE_DEVICES={environment['CUDA_VISIBLE_DEVICES']}"
        per_node = str(visible)
    if not (low.isdigit() and per_node.isdigit()):
        return Count(ranks=None, why=f"--nnodes {nodes} and --nproc_per_node {per_node} are no numbers")
    return Count(ranks=int(low) * int(per_node), nodes=int(low), why=" x ".join(said))


def visible_devices(environment: Environment) -> int | None:
    """How many GPUs CUDA_VISIBLE_DEVICES names; None where it is not set."""
    text = environment.get("CUDA_VISIBLE_DEVICES")
    return None if not text else len([part for part in text.split(",") if part.strip()])


_HOSTFILE = "/job/hostfile"
"""Where the deepspeed launcher looks. Source: deepspeed/launcher/constants.py and runner.py, DLTS_HOSTFILE."""


def deepspeed_count(options: Options, environment: Environment) -> Count:
    nodes, per_node = whole(options, "num_nodes"), whole(options, "num_gpus", "num_accelerators")
    include = options.get("i", options.get("include"))
    exclude = options.get("e", options.get("exclude"))
    hosts = _hosts(options.get("H", options.get("hostfile")))
    if (include or exclude) and (nodes is not None or per_node is not None):
        raise Problem(
            "deepspeed refuses --num_nodes and --num_gpus beside --include and --exclude; give one of the two"
        )
    for names in (("num_nodes",), ("num_gpus", "num_accelerators")):
        said = open_value(options, *names)
        if said not in (None, "-1"):
            return Count(ranks=None, why=f"--{names[0]} {said} is no number")
    if exclude and hosts:
        left = _without(hosts, str(exclude))
        return Count(
            ranks=sum(left.values()), nodes=len(left), why=f"hostfile of {len(hosts)} hosts, --exclude {exclude}"
        )
    if include:
        counts = [_slots(part, hosts, per_node) for part in str(include).split("@") if part]
        if None in counts:
            return Count(ranks=None, why=f"--include {include} names hosts whose slots are not known")
        ranks = sum(count or 0 for count in counts)
        return Count(ranks=ranks, nodes=len(counts), why=f"--include {include}")
    if hosts:
        chosen = list(hosts.values())[:nodes]
        ranks = sum(min(per_node, slots) if per_node else slots for slots in chosen)
        limits = "".join(f", --{name} {options[name]}" for name in ("num_nodes", "num_gpus") if name in options)
        return Count(ranks=ranks, nodes=len(chosen), why=f"hostfile of {len(hosts)} hosts{limits}")
    if per_node:
        said = f"--num_nodes {nodes} x " if nodes else ""
        return Count(ranks=(nodes or 1) * per_node, nodes=nodes or 1, why=f"{said}--num_gpus {per_node}")
    visible = visible_devices(environment)
    if visible is not None and (nodes or 1) == 1:
        return Count(ranks=visible, why=f"CUDA_VISIBLE_DEVICES={environment['CUDA_VISIBLE_DEVICES']}")
    return Count(ranks=None, why="deepspeed takes all GPUs of the machine: give --num_gpus")


def _hosts(path: Any) -> dict[str, int]:
    """Each host of a hostfile to its slots. Source: deepspeed/launcher/runner.py, _parse_hostfile."""
    file = Path(str(path) if path else _HOSTFILE)
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        if path:
            raise Problem(f"{path}: the hostfile cannot be read ({error})") from error
        return {}
    found = re.findall(r"^(\S+)\s+slots=(\d+)", text, re.M)
    return {host: int(slots) for host, slots in found}


def _slots(part: str, hosts: Mapping[str, int], per_node: int | None) -> int | None:
    host, colon, slots = part.partition(":")
    return len([slot for slot in slots.split(",") if slot]) if colon else hosts.get(host, per_node)


def _without(hosts: Mapping[str, int], exclude: str) -> dict[str, int]:
    """The hosts that --exclude leaves, with their slots. Source: deepspeed/launcher/runner.py, parse_resource_filter."""
    left = {host: set(range(slots)) for host, slots in hosts.items()}
    for part in exclude.split("@"):
        host, colon, slots = part.strip().partition(":")
        if host in left:
            gone = {int(slot) for slot in slots.split(",") if slot.strip().isdigit()} if colon else left[host]
            left[host] = left[host] - gone
    return {host: len(slots) for host, slots in left.items() if slots}


def mpirun_count(options: Options) -> Count:
    ranks, per_node = whole(options, "np", "n", "c"), whole(options, "N", "npernode", "ppn")
    hosts = next((str(options[name]) for name in ("H", "host", "hosts") if name in options), None)
    if ranks is None and hosts is not None and open_value(options, "np", "n", "c") is None:
        slots = [part.partition(":")[2] or "1" for part in hosts.split(",") if part]
        if all(slot.isdigit() for slot in slots):
            return Count(ranks=sum(map(int, slots)), nodes=len(slots), why=f"the slots of mpirun's hosts {hosts}")
    nodes = ranks // per_node if ranks and per_node and ranks % per_node == 0 else 1
    return Count(ranks=ranks, nodes=nodes, why=f"mpirun -np {ranks}" if ranks else "mpirun without -np")


def srun_count(options: Options, environment: Environment) -> Count:
    """By srun's own counts; where it has none, by those of the allocation."""
    nodes, tasks = whole(options, "N", "nodes"), whole(options, "n", "ntasks")
    per_node = whole(options, "ntasks_per_node")
    said = [f"srun's {name} {value}" for name, value in (("nodes", nodes), ("ntasks", tasks)) if value is not None]
    said += [f"srun's ntasks-per-node {per_node}"] if per_node is not None else []
    for names in (("n", "ntasks"), ("ntasks_per_node",), ("N", "nodes")):
        unknown = open_value(options, *names)
        if unknown is not None and (tasks is None or "n" in names):
            return Count(
                ranks=None, why=f"srun's {names[-1].replace('_', '-')} {unknown} leaves the number of tasks open"
            )
    per_gpu = whole(options, "ntasks_per_gpu")
    if tasks is None and per_node is None and per_gpu is not None:
        all_gpus, node_gpus = _gpus(options, "G", "gpus"), _gpus(options, "gpus_per_node")
        gpus = all_gpus if all_gpus is not None else (nodes or 1) * node_gpus if node_gpus is not None else None
        if gpus is not None:
            return Count(ranks=gpus * per_gpu, nodes=nodes or 1, why=f"srun's ntasks-per-gpu {per_gpu} x {gpus} GPUs")

    def told(variable: str) -> int | None:
        number = whole(environment, variable)
        if number is not None:
            said.append(f"{variable}={number}")
        return number

    nodes = told("SLURM_NNODES") if nodes is None else nodes
    if tasks is None and per_node is None:
        per_node = told("SLURM_NTASKS_PER_NODE")
        tasks = told("SLURM_NTASKS") if per_node is None else None
    ranks = tasks if tasks is not None else (nodes or 1) * per_node if per_node else None
    if ranks is None and nodes is not None:
        ranks = nodes
    why = " x ".join(said) or "srun without counts"
    return Count(ranks=ranks, nodes=nodes or 1, why=why)


def _gpus(options: Options, *names: str) -> int | None:
    """8 of 8, gpu:8 or h100:8."""
    found = next((re.search(r"(?:^|:)(\d+)$", str(options[name])) for name in names if name in options), None)
    return int(found[1]) if found else None
