"""DSP6xx: the optimizer block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dsplan.planner.rules.mechanism import ERROR, WARNING, Hit, replaced, rule
from dsplan.planner.rules.near_names import nearest
from dsplan.planner.rules.reading import number
from dsplan.planner.rules.structure import one_of
from dsplan.schemas.known_keys import lookup
from dsplan.schemas.positions import Document, escape, shape

if TYPE_CHECKING:
    from collections.abc import Iterator

TYPE, PARAMS = "/optimizer/type", "/optimizer/params"


def names(block: str) -> dict[str, list[str]]:
    """The known types of that block: deepspeed, torch and removed."""
    node = lookup(f"{block}/type") or {}
    found: dict[str, list[str]] = node["x-names"]
    return found


def optimizer_type(document: Document) -> str | None:
    """The optimizer's name as the tables spell it; None where it is none that is known."""
    written = document.at(TYPE)
    if not isinstance(written, str):
        return None
    for name in names("/optimizer")["deepspeed"]:
        if name.lower() == written.lower():
            return name
    return written if written in names("/optimizer")["torch"] else None


def params(document: Document, block: str = "/optimizer") -> dict[str, Any]:
    value = document.at(f"{block}/params")
    return value if isinstance(value, dict) else {}


@rule("DSP601", "unknown-optimizer", severity=ERROR, keys=[TYPE], raises="init")
def unknown_optimizer(document: Document) -> Iterator[Hit]:
    """optimizer.type must be one of DeepSpeed's nine in any case, or a class of torch.optim in exact case.

    Why:    The configuration is accepted; the engine fails when it starts.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "FusedAdam", "params": {"lr": 0.001}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}}
    Fix:    none
    Source: deepspeed/runtime/engine.py, _do_optimizer_sanity_check and _configure_basic_optimizer
    """
    written = document.at(TYPE)
    if not isinstance(written, str) or optimizer_type(document):
        return
    known = names("/optimizer")
    if written.lower() in [name.lower() for name in known["removed"]]:
        yield Hit(
            TYPE, f"optimizer.type is {shape(written)}, which DeepSpeed has removed", remedy="write AdamW or Lamb"
        )
        return
    meant = nearest(written, known["torch"] + known["deepspeed"])
    more = f'; did you mean "{meant}"?' if meant else f"; DeepSpeed's own are {', '.join(known['deepspeed'])}"
    fix = None
    if meant and meant.lower() == written.lower() and document.raw(TYPE)[:1] in "\"'":
        fix = replaced(document.values_at[TYPE], f'"{meant}"')
    yield Hit(TYPE, f"optimizer.type {shape(written)} is neither DeepSpeed's nor a class of torch.optim{more}", fix=fix)


@rule("DSP602", "optimizer-without-type", severity=ERROR, keys=[TYPE])
def optimizer_without_type(document: Document, zero_stage: int) -> Iterator[Hit]:
    """The optimizer block needs a type.

    Why:    Without it DeepSpeed ignores the whole block.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"params": {"lr": 0.001}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}}
    Fix:    none
    Source: deepspeed/runtime/config.py, get_optimizer_name
    """
    block = document.at("/optimizer")
    if isinstance(block, dict) and block and "type" not in block:
        more = f"; zero_stage {zero_stage} then needs one from the script" if zero_stage in (1, 2) else ""
        yield Hit(
            "/optimizer", f"optimizer has no type, so DeepSpeed ignores the block{more}", remedy="add type", on_key=True
        )


@rule("DSP603", "unknown-optimizer-argument", severity=ERROR, keys=[PARAMS], raises="init")
def unknown_optimizer_argument(document: Document) -> Iterator[Hit]:
    """optimizer.params must hold arguments of that optimizer.

    Why:    DeepSpeed passes them on, and Python raises a TypeError when the engine starts. Muon drops them silently.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "Lion", "params": {"lr": 0.001, "eps": 1e-8}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "Lion", "params": {"lr": 0.001}}}
    Fix:    none
    Source: deepspeed/runtime/engine.py, _configure_basic_optimizer
    """
    kind = optimizer_type(document)
    for name, meant, takes in unknown_arguments(document, "/optimizer", kind):
        fate = "; DeepSpeed drops it" if kind == "Muon" else ""
        yield Hit(
            f"{PARAMS}/{escape(name)}",
            f"optimizer {kind or 'unknown'} takes no {name}" + (f'; did you mean "{meant}"?' if meant else "") + fate,
            remedy=f'write "{meant}"' if meant else f"it takes {one_of(takes)}" if len(takes) <= 12 else "remove it",
            on_key=True,
            severity=WARNING if kind == "Muon" and not meant else ERROR,
            raises="never" if kind == "Muon" else None,
        )


def unknown_arguments(document: Document, block: str, kind: str | None) -> Iterator[tuple[str, str | None, list[str]]]:
    """Each argument that the type does not take, with the one that is meant, and all that it takes.

    Of an unknown type only those that are misspelt for every type.
    """
    node = lookup(f"{block}/params") or {}
    properties = {name: entry for name, entry in node["properties"].items() if "x-removed" not in entry}
    takes = node["x-takes"].get(kind)
    for name in params(document, block):
        if name in (properties if takes is None else takes) or name == "max_grad_norm":
            continue
        meant = nearest(name, takes or properties)
        for other in takes or properties:
            if name in properties.get(other, {}).get("x-known-as", ()):
                meant = other
        if takes is not None or meant:
            yield name, meant, sorted(takes or properties)


@rule("DSP604", "clipping-in-optimizer", severity=ERROR, keys=[f"{PARAMS}/max_grad_norm"], raises="init")
def clipping_in_optimizer(document: Document) -> Iterator[Hit]:
    """max_grad_norm is no argument of the optimizer; the key is gradient_clipping, at the top level.

    Why:    DeepSpeed raises when the engine starts, whatever the value.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "max_grad_norm": 1.0}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}}
    Fix:    none
    Source: deepspeed/runtime/engine.py, _configure_basic_optimizer
    """
    if "max_grad_norm" in params(document):
        limit = params(document)["max_grad_norm"]
        yield Hit(
            f"{PARAMS}/max_grad_norm",
            "optimizer.params.max_grad_norm is refused; the key for it is gradient_clipping, at the top level",
            remedy="move it to gradient_clipping",
            on_key=True,
            raises=None if isinstance(limit, (int, float)) or document.at(TYPE) is None else "parse",
        )


@rule("DSP605", "adam-is-adamw", severity=WARNING, keys=[TYPE])
def adam_is_adamw(document: Document) -> Iterator[Hit]:
    """Type Adam is AdamW unless adam_w_mode is false.

    Why:    With weight_decay above 0 the two train differently.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "Adam", "params": {"lr": 0.001, "weight_decay": 0.1}}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "weight_decay": 0.1}}}
    Fix:    none
    Source: deepspeed/runtime/engine.py, _configure_basic_optimizer
    """
    values = params(document)
    decay = number(values.get("weight_decay", 0)) or 0
    if optimizer_type(document) == "Adam" and decay > 0 and "adam_w_mode" not in values:
        yield Hit(
            TYPE,
            f"optimizer Adam with weight_decay {decay:g} is AdamW, since adam_w_mode is true by default",
            remedy="write AdamW, or set adam_w_mode to false",
        )


@rule("DSP606", "untested-optimizer", severity=ERROR, keys=[TYPE, "/zero_allow_untested_optimizer"], raises="init")
def untested_optimizer(document: Document, zero_stage: int, reader: str) -> Iterator[Hit]:
    """With ZeRO, an optimizer that DeepSpeed does not test needs zero_allow_untested_optimizer.

    Why:    DeepSpeed asserts it when the engine starts.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 1}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": true}
    Fix:    none
    Source: deepspeed/runtime/zero/utils.py, is_zero_supported_optimizer; deepspeed/runtime/engine.py
    """
    kind = optimizer_type(document)
    tested = ("Adam", "AdamW", "Adagrad", "Lion", "Muon")
    if kind and kind not in tested and zero_stage > 0 and not document.at("/zero_allow_untested_optimizer"):
        yield Hit(
            TYPE,
            f"optimizer {kind} is not among those that ZeRO is tested with, and zero_stage {zero_stage} refuses it",
            remedy="set zero_allow_untested_optimizer to true",
        )


@rule("DSP607", "muon-at-stage-3", severity=ERROR, keys=[TYPE], raises="init")
def muon_at_stage_3(document: Document, zero_stage: int) -> Iterator[Hit]:
    """Muon at zero_stage 3 needs reduce_scatter false.

    Why:    DeepSpeed refuses it when the engine starts, and reduce_scatter is true by default.
    Bad:    {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "Muon", "params": {"lr": 0.01}}, "zero_optimization": {"stage": 3}}
    Good:   {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": "Muon", "params": {"lr": 0.01}}, "zero_optimization": {"stage": 3, "reduce_scatter": false}}
    Fix:    none
    Source: deepspeed/runtime/zero/stage3.py
    """
    if optimizer_type(document) == "Muon" and zero_stage == 3:
        scatter = document.at("/zero_optimization/reduce_scatter", True)
        if scatter in (True, "auto", "true"):
            yield Hit(
                TYPE, "optimizer Muon at zero_stage 3 needs zero_optimization.reduce_scatter false", remedy="set it"
            )
