"""What is changed in a model before it is traced: adapters, quantised and frozen weights, the loss, attention, packing."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from dsplan.schemas.problem import Problem

Quantized = Literal["nf4", "int8"]
Attention = Literal["flash", "sdpa", "eager"]
QUANTIZED: tuple[Quantized, ...] = ("nf4", "int8")
ATTENTIONS: tuple[Attention, ...] = ("flash", "sdpa", "eager")
ALL_LINEAR = "all-linear"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Low-rank adapters beside frozen weights, as PEFT's LoraConfig has them.

    Source: Hu et al. 2021 (arXiv:2106.09685), section 4.1; peft/tuners/lora/config.py for names and defaults.
    """

    r: int = 8
    alpha: int = 8
    """Scales what the adapter adds; changes no byte."""
    dropout: float = 0.0
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """Names of modules, whole or by their last parts; or all-linear."""
    modules_to_save: tuple[str, ...] = ()
    """Modules of which a second, trainable copy is made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """plain: the model's own. fused: the output layer and the loss are one kernel, which keeps no logits. chunked: logits in
    `chunks` parts, each computed again in backward."""

    kind: Literal["plain", "fused", "chunked"]
    chunks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapting:
    """The changes, all of them optional."""

    lora: Lora | None = None
    quantize: Quantized | None = None
    freeze: tuple[str, ...] = ()
    """Globs over names of parameters and modules."""
    loss: Loss | None = None
    attention: Attention | None = None
    packed: bool = False

    @property
    def asked(self) -> tuple[str, ...]:
        """The options that change something, as the user writes them."""
        return tuple(
            option
            for option, value in (
                ("--lora", self.lora),
                ("--quantize", self.quantize),
                ("--freeze", self.freeze),
                ("--loss", self.loss),
                ("--packed", self.packed),  # before the attention that it brings
                ("--attention", self.attention),
            )
            if value
        )


AS_IT_IS = Adapting()


def adapting_of(
    lora: str | None = None,
    quantize: str | None = None,
    freeze: Sequence[str] | None = None,
    loss: str | None = None,
    attention: str | None = None,
    packed: bool = False,
) -> Adapting:
    """What the options say. Problem where one cannot be read, or two exclude each other."""
    if packed and attention in ("sdpa", "eager"):
        raise Problem(
            f"--packed needs attention that takes sequences of any length in one row, which --attention {attention} does not; "
            "leave it out, or choose --attention flash"
        )
    for pattern in freeze or ():
        if not pattern.strip():
            raise Problem(
                "--freeze is empty; write a glob over names of parameters or modules: --freeze 'model.layers.*'"
            )
    return Adapting(
        lora=parse_lora(lora) if lora is not None else None,
        quantize=_one_of("--quantize", quantize, QUANTIZED) if quantize is not None else None,
        freeze=tuple(freeze or ()),
        loss=parse_loss(loss) if loss is not None else None,
        attention=_one_of("--attention", attention, ATTENTIONS)
        if attention is not None
        else "flash"
        if packed
        else None,
        packed=packed,
    )


_Name = TypeVar("_Name", bound=str)


def _one_of(option: str, value: str, allowed: Sequence[_Name]) -> _Name:
    for name in allowed:
        if value == name:
            return name
    raise Problem(f"{option} {value} is not known; choose from {', '.join(allowed)}")


_LORA_KEYS = ("r", "alpha", "dropout", "targets", "modules_to_save")
_PEFT_NAMES = {
    "rank": "r",
    "lora_r": "r",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "target_modules": "targets",
}


def parse_lora(text: str) -> Lora:
    """Of --lora r=16,alpha=32,targets=q_proj,v_proj: what bears no = belongs to the list before it."""
    found: dict[str, list[str]] = {}
    key = None
    for part in text.split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        if equals:
            key = _PEFT_NAMES.get(name, name)
            if key not in _LORA_KEYS:
                raise Problem(f"--lora {text}: {name or 'nothing'} is not known{near(name, _LORA_KEYS)}; {_LORA_FORM}")
            if key in found:
                raise Problem(f"--lora {text}: {name} is given twice; keep one")
            found[key] = [value]
        elif key in ("targets", "modules_to_save"):
            found[key].append(name)
        else:
            raise Problem(f"--lora {text}: {name or 'nothing'} cannot be read; {_LORA_FORM}")
    for key, values in found.items():
        if not all(values):
            raise Problem(f"--lora {text}: {key} is empty; {_LORA_FORM}")
    made = Lora()
    if "r" in found:
        made = replace(made, r=_whole(text, "r", found["r"][0]))
    if "alpha" in found:
        made = replace(made, alpha=_whole(text, "alpha", found["alpha"][0]))
    if "dropout" in found:
        made = replace(made, dropout=_part(text, "dropout", found["dropout"][0]))
    targets = tuple(found.get("targets", made.targets))
    if ALL_LINEAR in targets and len(targets) > 1:
        raise Problem(f"--lora {text}: targets names all-linear and more; keep one of the two")
    return replace(made, targets=targets, modules_to_save=tuple(found.get("modules_to_save", ())))


_LORA_FORM = "write --lora r=16,alpha=32,targets=all-linear, or targets=q_proj,v_proj"


def _whole(text: str, key: str, value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise Problem(f"--lora {text}: {key} is {value}, but must be a whole number of at least 1")
    return int(value)


def _part(text: str, key: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number < 1:
        raise Problem(f"--lora {text}: {key} is {value}, but must be at least 0 and below 1")
    return number


def parse_loss(text: str) -> Loss:
    """Of --loss plain, fused or chunked:N."""
    kind, colon, number = text.partition(":")
    if kind == "chunked" and colon and number.isdecimal() and int(number) >= 1:
        return Loss(kind="chunked", chunks=int(number))
    if kind == "chunked":
        raise Problem(f"--loss {text} needs a whole number of chunks: --loss chunked:8")
    if colon or kind not in ("plain", "fused"):
        raise Problem(f"--loss {text} is not known; choose from plain, fused, chunked:N")
    return Loss(kind="plain" if kind == "plain" else "fused")


def near(name: str, known: Iterable[str]) -> str:
    """ "; did you mean X?", or nothing."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {found[0]}?" if found else ""


OF_HF_ALONE = ("--quantize", "--loss", "--attention", "--packed")
"""Options that need to know more of a model than its modules."""


def check_model_file(path: str, adapting: Adapting) -> None:
    """Problem where an option is for Hugging Face models alone."""
    for option in adapting.asked:
        if option in OF_HF_ALONE:
            raise Problem(
                f"{option} is for the config of a Hugging Face model, but {path} is a model file, which builds its layers, "
                "attention and loss itself; change them in build_model(), or give the config.json"
            )


def check_script(path: str, adapting: Adapting) -> None:
    """Problem where an option is given with a training script."""
    for option in adapting.asked:
        raise Problem(
            f"{option} changes a model before it is traced, but {path} is a script, which builds and changes its model itself; "
            "pass the script's own option after --, or give the config.json or a model file"
        )
