"""Resolve: what a configuration is once its reader has read it. Imports neither torch nor anything else that is heavy."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

from dsplan.planner.auditing.filling import ACCELERATE_FILLS, HIDDEN_SIZE_KEYS, PLUGIN_FILLS, Filled, filled_values
from dsplan.planner.auditing.holding import ZERO, held_by_deepspeed
from dsplan.planner.auditing.linting import Setting, lint_source
from dsplan.planner.auditing.open_values import define
from dsplan.planner.auditing.reading import read
from dsplan.planner.auditing.sources import STDIN, sources
from dsplan.planner.rules import RULES
from dsplan.schemas.companion import Companion
from dsplan.schemas.config import AUTO
from dsplan.schemas.known_keys import lookup
from dsplan.schemas.positions import Document, steps
from dsplan.schemas.problem import Problem
from dsplan.schemas.resolved import Held, Origin, Resolved

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dsplan.schemas.cluster import Cluster
    from dsplan.schemas.finding import FileFindings, Reader

_SCRIPT_GIVES_IT = "DSP101"
"""A file without any batch size: DeepSpeed refuses it, but scripts lay one over it."""


def resolve(
    path: str,
    *,
    reader: str = "auto",
    companion: Companion | None = None,
    cluster: Cluster | None = None,
    everything: bool = False,
    defines: Mapping[str, str] | None = None,
) -> Resolved:
    """The configuration at `path` as its reader holds it. Problem, with the place, where that reader refuses the file.

    everything: also the members of blocks that the file does not have. defines: what fills the placeholders of a template.
    """
    named = list(sources([path]))
    if len(named) != 1:
        raise Problem(f"{path}: holds {len(named)} configurations; name one of them")
    source = named[0]
    reading = read(source, reader, companion.kind if companion else None)
    setting = Setting(
        cluster=cluster,
        reader=reading.read_as,
        engine="deepspeed",
        rules=tuple(RULES.values()),
        companion=companion,
        fit=None,
        defines=defines or {},
    )
    found = lint_source(source, setting)
    _refuse(found)
    assert reading.document is not None
    document = define(reading.document, setting.defines)
    assert isinstance(document.value, dict)
    values, ranks = held_values(document, reading.read_as, companion, cluster, everything=everything)
    return Resolved(
        file=source.name, read_as=reading.read_as, ranks=ranks, values=tuple(values), refusals=_refusals(found)
    )


def resolve_pair(a: str, b: str, *, reader: str, **beside: Any) -> tuple[Resolved, Resolved]:
    """Both, whole and by one reader: where "auto" decides, by the one that fills an "auto" in either of them."""
    if a == b == STDIN:
        raise Problem("both files are -, but standard input can be read once; write one of them as a file")
    first, second = (resolve(path, reader=reader, everything=True, **beside) for path in (a, b))
    if first.read_as != second.read_as:
        if STDIN in (a, b):
            raise Problem("one file is for DeepSpeed and one for HF to fill; say who reads both by --for")
        by = next(one.read_as for one in (first, second) if one.read_as != "deepspeed")
        first, second = (resolve(path, reader=by, everything=True, **beside) for path in (a, b))
    return first, second


def _refusals(found: FileFindings) -> tuple[str, ...]:
    """What the reader finds unlike its arguments (DSP020 to DSP039)."""
    return tuple(
        f"{found.file}:{finding.span.line}:{finding.span.column}: {finding.message} [{finding.rule}]"
        for finding in found.findings
        if finding.severity == "error" and "DSP020" <= finding.rule <= "DSP039"
    )


def _refuse(found: FileFindings) -> None:
    """Problem with the first thing on which the reader raises before it holds anything."""
    refused = [
        finding
        for finding in found.findings
        if finding.raises in ("load", "parse") and finding.rule != _SCRIPT_GIVES_IT
    ]
    if refused:
        first, more = refused[0], len(refused) - 1
        rest = f" (and {more} more; dsplan lint shows all)" if more else ""
        place = f"{found.file}:{first.span.line}:{first.span.column}"
        raise Problem(f"{place}: {first.message} [{first.rule}]{rest}; the reader refuses the file")


def held_values(
    document: Document,
    reader: Reader,
    companion: Companion | None = None,
    cluster: Cluster | None = None,
    *,
    everything: bool = False,
) -> tuple[list[Held], int | None]:
    """The values, and the GPUs that share the batch. The document must be one that the reader takes."""
    value, told = _as_handed_over(document, reader, companion, cluster)
    return held_by_deepspeed(document, value, told, cluster, everything=everything)


def _as_handed_over(
    document: Document, reader: Reader, companion: Companion | None, cluster: Cluster | None
) -> tuple[dict[str, Any], dict[str, tuple[Origin, str]]]:
    """The object that DeepSpeed is given: the file's, with "auto" filled and what the reader adds."""
    value = copy.deepcopy(document.value)
    told: dict[str, tuple[Origin, str]] = {}
    if reader == "deepspeed":
        return value, told
    table = _table(document, reader, companion, cluster)
    for pointer, entry in document.walk():
        if isinstance(entry, str) and entry == AUTO:
            if pointer in table:
                _put(value, pointer, table[pointer].value)
                told[pointer] = ("auto", f"from {table[pointer].origin}")
            elif _is_filled_by(pointer, reader):
                told[pointer] = ("auto", _unfilled(pointer, reader))
    for pointer, entry, why in _added(value, companion):
        _put(value, pointer, entry)
        told[pointer] = ("reader", why)
    return value, told


def _table(
    document: Document, reader: Reader, companion: Companion | None, cluster: Cluster | None
) -> dict[str, Filled]:
    left: dict[str, Filled] = {}
    if reader == "trainer":
        left = {pointer: Filled(value, "Accelerate, for the Trainer") for pointer, value in PLUGIN_FILLS.items()}
    if companion is not None:
        ranks = cluster.ranks if cluster else None
        return left | filled_values(companion, ranks=ranks, stage=document.at(f"{ZERO}/stage"), own=document.value)
    if reader == "trainer":
        return left | {"/scheduler/params/warmup_min_lr": Filled(0, "the Trainer itself")}
    return {}


def _is_filled_by(pointer: str, reader: Reader) -> bool:
    filler = (lookup(pointer) or {}).get("x-auto")
    return filler == "trainer" or (filler == "accelerate" and reader == "accelerate")


def _unfilled(pointer: str, reader: Reader) -> str:
    """Who will fill it, where nothing tells the value."""
    if pointer in HIDDEN_SIZE_KEYS:
        return "will be filled by the model's hidden_size"
    if reader == "accelerate":
        return "will be filled by the script or Accelerate's file" if pointer in ACCELERATE_FILLS else "nobody fills it"
    names = filled_values(Companion(kind="trainer", source="", max_steps=1), ranks=1)
    origin = (
        names[pointer].origin.removesuffix("'s default").removesuffix(" 1")
        if pointer in names
        else "the training arguments"
    )
    return f"will be filled by {origin}; give --args" + (" and --cluster" if pointer == "/train_batch_size" else "")


def _added(value: Mapping[str, Any], companion: Companion | None) -> Iterator[tuple[str, Any, str]]:
    """What stands in the object unasked. Source: accelerate/utils/dataclasses.py, DeepSpeedPlugin; accelerator.py."""
    if value.get("gradient_accumulation_steps") is None:
        yield "/gradient_accumulation_steps", 1, "Accelerate adds it"
    precision = companion.precision if companion else None
    if precision in ("fp16", "bf16") and precision not in value:
        yield f"/{precision}", {"enabled": True} | ({"auto_cast": True} if precision == "fp16" else {}), ""
        yield f"/{precision}/enabled", True, f"Accelerate adds the block for {precision}"
        if precision == "fp16":
            yield "/fp16/auto_cast", True, "Accelerate adds it"
    yield "/steps_per_print", math.inf, "Accelerate switches the prints off"
    if value.get("optimizer") is None:
        yield "/zero_allow_untested_optimizer", True, "Accelerate sets it for an optimizer of the script's"


def _put(value: Any, pointer: str, entry: Any) -> None:
    *path, last = steps(pointer)
    for step in path:
        value = value[int(step)] if isinstance(value, list) else value.setdefault(step, {})
    value[int(last) if isinstance(value, list) else last] = entry
