"""The optimizer block of the JSON -> the class that carries it out, and its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from dsplan.runtime.optimizing.adam import FusedAdam
from dsplan.runtime.optimizing.kinds import wrong_kinds
from dsplan.runtime.optimizing.lamb import Lamb
from dsplan.runtime.optimizing.lion import Lion
from dsplan.runtime.optimizing.muon import Muon
from dsplan.schemas import native_support
from dsplan.schemas.config import Named
from dsplan.schemas.problem import Problem
from torch import nn
from torch.optim import Optimizer

TORCHS = {
    name.lower(): name
    for name in ("Adam", "AdamW", "SGD", "Adagrad", "RMSprop", "Adamax", "NAdam", "RAdam", "Adadelta")
}
"""What works element by element, and so on shards as on whole tensors."""
OWN: dict[str, Callable[..., Optimizer]] = {"lion": Lion, "lamb": Lamb, "muon": Muon}
OF_MUON = ("lr", "momentum", "weight_decay", "ns_method", "betas", "eps", "muon_lr", "adam_lr", "adam_w_mode")
IGNORED = ("set_grad_none", "fp32_optimizer_states")
"""native_support says what becomes of these."""


@dataclass(frozen=True)
class Recipe:
    kind: Callable[..., Optimizer]
    options: dict[str, Any]
    known: tuple[str, ...]
    """Every option that there is."""


def recipe(named: Named) -> Recipe:
    """Problem for a type that is not carried out. Names are taken in any case.

    As in DeepSpeed, Adam is AdamW unless adam_w_mode is false, weight_decay is 0 unless given (torch_adam: torch's), and
    Muon trains matrices with itself and the rest with AdamW.
    """
    kind = named.type.lower()
    options = {key: value for key, value in _plain(named.params).items() if key not in IGNORED}
    if kind in ("adam", "adamw"):
        return _adam(kind, options)
    if kind == "muon":
        options.pop("torch_adam", None)  # the same arithmetic
        return Recipe(Muon, options, OF_MUON)
    if kind in TORCHS:
        return _described(getattr(torch.optim, TORCHS[kind]), options)
    if kind in OWN:
        return _described(OWN[kind], options)
    raise Problem(
        f"optimizer.type {named.type} is not carried out by the native engine; use "
        f"{', '.join(native_support.OPTIMIZERS)}, or pass an optimizer object"
    )


def _adam(kind: str, options: dict[str, Any]) -> Recipe:
    """torch's own classes where they do what is asked, by the fused kernel unless foreach is named."""
    torch_adam, w_mode = options.pop("torch_adam", False), options.pop("adam_w_mode", True)
    w_mode = kind == "adamw" or w_mode is not False
    if "foreach" not in options:
        options["fused"] = True
    if options.get("bias_correction", True) is False and not torch_adam:
        return _described(FusedAdam, {**options, "adam_w_mode": w_mode})
    if options.pop("bias_correction", True) is False:
        options["bias_correction"] = False  # torch's own has no such option, and says so
    if not torch_adam:
        options.setdefault("weight_decay", 0.0)
    return _described(torch.optim.AdamW if w_mode else torch.optim.Adam, options)


def _described(kind: Callable[..., Optimizer], options: dict[str, Any]) -> Recipe:
    known = [name for name, it in inspect.signature(kind).parameters.items() if it.kind is not it.VAR_KEYWORD]
    return Recipe(kind, options, tuple(name for name in known if name != "params"))


def wrong_options(named: Named) -> list[str]:
    """What the optimizer does not take: every unknown name, else every value of a wrong kind, else the first wrong value.
    Nothing where its type is unknown."""
    try:
        made = recipe(named)
    except Problem:  # native_support says so
        return []
    options = {key: value for key, value in made.options.items() if not (isinstance(value, str) and value == "auto")}
    unknown = [key for key in options if key not in made.known]
    unknown = [key for key in unknown if f"optimizer.params.{key}" not in native_support.KEYS]
    if unknown:
        return [f"{named.type} does not take {', '.join(unknown)}"]
    options = {key: value for key, value in options.items() if key in made.known}
    wrong = wrong_kinds(_muon_options if made.kind is Muon else made.kind, options)
    if wrong:
        return [f"{named.type}: {', '.join(wrong)}"]
    parameter = nn.Parameter(torch.zeros(1))
    try:
        if made.kind is Muon:
            Muon([{"params": [parameter], "use_muon": True, **options}])
        else:
            made.kind([parameter], **options)
    except (TypeError, ValueError, RuntimeError) as error:
        return [f"{named.type} does not take these ({error})"]
    return []


def _muon_options(
    lr: float = 0.02,
    momentum: float = 0.95,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-10,
    muon_lr: float | None = None,
    adam_lr: float | None = None,
) -> None:
    """The kinds of what Muon's block holds."""


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
