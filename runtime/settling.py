"""The one configuration of a run: what the script gives under what the launch orders, the same on every rank."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from dsplan.runtime.groups import carries_data, note
from dsplan.runtime.launching.orders import current_orders, lay_over, with_kept_batch
from dsplan.runtime.refusals import judge_whole
from dsplan.schemas.batch import Batch
from dsplan.schemas.config import DsConfig
from dsplan.schemas.jsonfile import SyntaxProblem, load_config_file, read_document
from dsplan.schemas.problem import Problem
from torch.optim import Optimizer

EACH_RANKS_OWN = ("tensorboard", "csv_monitor", "wandb", "comet", "steps_per_print", "dump_state", "log_level")
"""Reports, which scripts like to have from one rank alone. All else must be the same on every rank."""


def settle_config(given: Any, args: Any, *, optimizer: Any = None, lr_scheduler: Any = None) -> tuple[DsConfig, Batch]:
    """The script's config under the launch's orders, every value checked and the batch equation solved.

    optimizer, lr_scheduler: as the script brings them, if it does. Problem on every rank where one has another config,
    optimizer or schedule than rank 0, or no config that can be read.
    """
    problem: str | None = None
    raw: dict[str, Any] = {}
    source, changes = "config", list[str]()
    try:
        raw, source, changes = _settle(_given(given, args))
    except Problem as error:
        problem = str(error)
    _refuse_unequal(
        {
            "problem": problem,
            **_brought("optimizer", optimizer),
            **_brought("lr_scheduler", lr_scheduler),
            **{key: value for key, value in raw.items() if key not in EACH_RANKS_OWN},
        }
    )
    if problem is not None:
        raise Problem(problem)
    verdict, batch = judge_whole(
        raw,
        source,
        dp=dist.get_world_size(),
        has_optimizer=optimizer is not None,
        has_scheduler=lr_scheduler is not None,
    )
    for change in changes:
        key = change.split(" ")[0]
        if not any(key == name or key.startswith(f"{name}.") for name in verdict.without_effect):
            note(f"{source} over the script's config: {change}")
    for warning in verdict.warnings:
        note(f"{source}: {warning}")
    return verdict.accepted(), batch


def _brought(name: str, given: Any) -> dict[str, Any]:
    """What must be the same on every rank of an object that the script brings: its class, and an optimizer's groups."""
    found: dict[str, Any] = {f"initialize's {name}": "none" if given is None else type(given).__name__}
    for number, group in enumerate(given.param_groups if isinstance(given, Optimizer) else ()):
        found[f"initialize's {name}, group {number}"] = {**group, "params": len(group["params"])}
    return found


def _given(given: Any, args: Any) -> Any:
    """config, or what the arguments name. DeepSpeed refuses both too."""
    if given is not None and not isinstance(given, (Mapping, str, Path)):
        raise Problem(f"config is {type(given).__name__}, but must be a path or a dict")
    for name in ("deepspeed_config", "deepscale_config"):
        named = getattr(args, name, None)
        if named is None:
            continue
        if given is not None:
            raise Problem(
                f"initialize is given config= and args.{name} ({named}); DeepSpeed takes one of them: leave out config=, or set "
                f"args.{name} to None"
            )
        given = named
    return given


def _settle(given: Any) -> tuple[dict[str, Any], str, list[str]]:
    """(config, where it is from, what the orders changed of the script's)."""
    orders = current_orders()
    ordered = orders.config if orders is not None else None
    if given is None and ordered is None:
        raise Problem("initialize needs a config: pass config= (a path or a dict), or args with deepspeed_config")
    raw, source = _read(given) if given is not None else ({}, "config")
    changes: list[str] = []
    if orders is not None and ordered is not None:
        raw, changes = lay_over(raw, ordered)
        source = orders.source
    if orders is not None and orders.kept_batch is not None:
        raw = with_kept_batch(raw, orders.kept_batch)
    return raw, source, changes if given is not None else []


def _read(given: Mapping[str, Any] | str | Path) -> tuple[dict[str, Any], str]:
    """A dict, a path, or the file's text in URL-safe base64, as DeepSpeed takes it."""
    if isinstance(given, Mapping):
        return dict(given), "config"
    if isinstance(given, str) and not Path(given[:4096]).exists():
        packed = _unpacked(given)
        if packed is not None:
            return packed, "config"
    return load_config_file(given), str(given)


def _unpacked(text: str) -> dict[str, Any] | None:
    try:
        value = read_document(base64.urlsafe_b64decode(text).decode("utf-8"), "hjson").value
    except (binascii.Error, ValueError, SyntaxProblem):
        return None
    return value if isinstance(value, dict) else None


def _refuse_unequal(mine: Mapping[str, Any]) -> None:
    if dist.get_world_size() == 1 or not carries_data():
        return
    flat = dict(_flat(mine, ""))
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, hashlib.sha256(json.dumps(flat, sort_keys=True).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    configs: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(configs, flat)
    for rank, other in enumerate(configs):
        for key in dict.fromkeys([*configs[0], *other]):
            here, there = configs[0].get(key, "absent"), other.get(key, "absent")
            if here == there:
                continue
            if key == "problem":
                bad, text = (rank, there) if there != "null" else (0, here)
                raise Problem(f"rank {bad}, and not every rank: {json.loads(text)}")
            raise Problem(
                f"rank {rank} has another config than rank 0: {key} is {there} there and {here} on rank 0; give every rank the "
                "same"
            )


def _flat(value: Mapping[str, Any], prefix: str) -> list[tuple[str, str]]:
    """Every leaf as (dotted key, JSON text)."""
    found: list[tuple[str, str]] = []
    for key, member in value.items():
        if isinstance(member, Mapping) and member:
            found += _flat(member, f"{prefix}{key}.")
        else:
            found.append((f"{prefix}{key}", json.dumps(member, sort_keys=True, default=str)))
    return found
