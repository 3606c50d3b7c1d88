"""Lint: files in, findings out. Imports neither torch nor anything else that is heavy."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from dsplan.planner.rules import RULES, Hit, Rule, run
from dsplan.planner.rules.fit import Fit
from dsplan.planner.rules.known_keys import members
from dsplan.schemas.cluster import Cluster
from dsplan.schemas.companion import Companion
from dsplan.schemas.config import AUTO, DsConfig, read_config
from dsplan.schemas.config import ConfigError as _ConfigError
from dsplan.schemas.finding import FileFindings, Finding, Moment, Reader, SkippedRule, Span
from dsplan.schemas.jsonfile import decode, read_document, read_text
from dsplan.schemas.known_keys import lookup, schema
from dsplan.schemas.positions import Document, SyntaxProblem, steps
from dsplan.schemas.problem import Problem

STDIN = "-"
NEEDS = {"cluster": "--cluster", "zero_stage": "--args", "companion": "--args", "fit": "--model"}
"""What a rule may need and the user can give, to the option that gives it."""
_SKIPPED_FOLDERS = {"node_modules", "__pycache__", "build", "dist"}


def lint(
    paths: Sequence[str],
    *,
    cluster: Cluster | None = None,
    reader: Reader | Literal["auto"] | str = "auto",
    engine: str = "deepspeed",
    args: str | None = None,
    model: str | None = None,
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
) -> list[FileFindings]:
    """The findings of each file, in the order of the paths. Problem where a file's text cannot be had.

    "-" is stdin. A folder stands for the *.json below it that look like DeepSpeed configurations. reader auto: whoever fills
    the file's "auto" values, else DeepSpeed. engine native or both: also what the native engine does not carry out.
    """
    again = linter(cluster=cluster, reader=reader, engine=engine, args=args, model=model, select=select, ignore=ignore)
    return [again(text, name) for name, text in _texts(paths)]


def linter(
    *,
    cluster: Cluster | None = None,
    reader: str = "auto",
    engine: str = "deepspeed",
    args: str | None = None,
    model: str | None = None,
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
) -> Callable[[str, str], FileFindings]:
    """A function from (text, name) to its findings, for `lint` and for what lints a text again after a fix."""
    fit = _fits(model, cluster, args, engine) if model is not None else None
    rules = chosen_rules(select, ignore)
    companion = _companion(args)

    def again(text: str, name: str) -> FileFindings:
        return lint_text(
            text,
            name,
            cluster=cluster,
            reader=reader,
            engine=engine,
            rules=rules,
            companion=companion,
            fit=fit,
        )

    return again


def lint_text(
    text: str,
    name: str = "config",
    *,
    cluster: Cluster | None = None,
    reader: str = "auto",
    engine: str = "deepspeed",
    rules: Sequence[Rule] | None = None,
    companion: Companion | None = None,
    fit: Fit | Callable[[dict[str, Any]], Fit | str] | None = None,
) -> FileFindings:
    """The findings of one text. The companion says what the reader puts in the place of "auto".

    fit: what the configuration takes on the GPUs, or the function that tells it (or why it cannot).
    """
    read_as, document, syntax = _read(text, reader)
    needs = dict(NEEDS)
    context: dict[str, Any] = {"reader": read_as}
    if cluster is not None:
        context["cluster"] = cluster
    else:
        context["world_size_unknown"] = True
    if companion is not None:
        context["companion"] = companion
    if document is not None:
        context["document"] = document
        context |= _meaning(document, read_as, _filled(companion) if companion else {})
        if read_as != "deepspeed":
            context["hf_reader"] = read_as
        if engine in ("native", "both") and isinstance(document.value, dict):
            context["native"] = document.value
        if fit is not None and isinstance(document.value, dict):
            told = fit(document.value) if callable(fit) else fit
            if isinstance(told, str):
                needs["fit"] = told
            else:
                context["fit"] = told
    else:
        context["syntax"] = syntax
    findings: list[Finding] = []
    skipped: list[SkippedRule] = []
    for rule in RULES.values() if rules is None else rules:
        missing = [need for need in rule.needs if need not in context]
        if not missing:
            findings += [_finding(rule, hit, document, read_as) for hit in run(rule, context)]
        elif document is not None and isinstance(document.value, dict) and all(need in needs for need in missing):
            skipped.append(SkippedRule(rule=rule.id, needs=" ".join(needs[need] for need in missing)))
    findings.sort(key=lambda finding: (finding.span.line, finding.span.column, finding.rule))
    unique = tuple(dict.fromkeys(findings))
    return FileFindings(file=name, read_as=read_as, text=text, findings=unique, skipped_rules=tuple(skipped))


def chosen_rules(select: Iterable[str], ignore: Iterable[str]) -> list[Rule]:
    """The rules that --select and --ignore leave. An id, a name, or a beginning such as DSP1 or DSP10."""
    wanted, unwanted = list(select), list(ignore)

    def matches(rule: Rule, pattern: str) -> bool:
        return rule.name == pattern or rule.id.startswith(pattern.upper())

    for pattern in wanted + unwanted:
        if not pattern or not any(matches(rule, pattern) for rule in RULES.values()):
            raise Problem(f"{pattern!r} is no rule; dsplan rules lists them")
    chosen = [
        rule
        for rule in RULES.values()
        if (not wanted or any(matches(rule, pattern) for pattern in wanted))
        and not any(matches(rule, pattern) for pattern in unwanted)
    ]
    if not chosen:
        raise Problem("--select and --ignore leave no rule; take one of them back")
    return chosen


def _read(text: str, reader: str) -> tuple[Reader, Document | None, SyntaxProblem | None]:
    """Who reads the text, and the text as it reads it."""
    if reader == "auto":
        try:
            document = read_document(text, "json")
            read_as = filling_reader(document)
            if read_as is not None:
                return read_as, document, None
        except SyntaxProblem:
            pass
        reader = "deepspeed"
    told: Reader = "trainer" if reader == "trainer" else "accelerate" if reader == "accelerate" else "deepspeed"
    try:
        return told, read_document(text, "hjson" if told == "deepspeed" else "json"), None
    except SyntaxProblem as syntax:
        return told, None, syntax


def filling_reader(document: Document) -> Reader | None:
    """Who fills the "auto" values of the document: the HF Trainer, Accelerate where only it does, or nobody."""
    fillers = {
        (member.node or {}).get("x-auto")
        for member in members(document)
        if isinstance(member.value, str) and member.value == AUTO
    } - {None}
    if not fillers:
        return None
    return "accelerate" if "accelerate" in fillers and "zero_optimization" in document.value else "trainer"


def _meaning(document: Document, reader: Reader, filled: Mapping[str, Any]) -> dict[str, Any]:
    """config and zero_stage, as far as they are known. A value that is wrong counts as absent: other rules speak of it."""
    if not isinstance(document.value, dict):
        return {}
    raw = copy.deepcopy(document.value)
    for pointer, value in document.walk():
        if isinstance(value, float) and not math.isfinite(value):
            _remove(raw, pointer)
    for pointer, value in filled.items():
        if document.at(pointer) == AUTO:
            _replace(raw, pointer, value)
    config = _tolerant(raw)
    if config is None:
        return {}
    meaning: dict[str, Any] = {"config": config}
    stage_filled = filled.get("/zero_optimization/stage") is not None
    if not (reader == "accelerate" and document.at("/zero_optimization/stage") == AUTO and not stage_filled):
        meaning["zero_stage"] = config.zero_stage
    return meaning


def _tolerant(raw: dict[str, Any]) -> DsConfig | None:
    for _ in range(100):
        try:
            return read_config(raw)
        except _ConfigError as error:
            for pointer, _ in error.reasons:
                _remove(raw, pointer)
    return None


def _remove(raw: Any, pointer: str) -> None:
    *path, last = steps(pointer) or [""]
    for step in path:
        raw = raw.get(step) if isinstance(raw, dict) else None
    if isinstance(raw, dict):
        raw.pop(last, None)


def _replace(raw: Any, pointer: str, value: Any) -> None:
    *path, last = steps(pointer)
    for step in path:
        raw = raw.get(step) if isinstance(raw, dict) else None
    if isinstance(raw, dict):
        raw[last] = value


def _fits(model: str, cluster: Cluster | None, args: str | None, engine: str) -> Callable[[dict[str, Any]], Fit | str]:
    """A function from a file's object to what it takes on the cluster's GPUs, by `estimate`. Loads the model, and torch."""
    if cluster is None or cluster.gpu is None:
        raise Problem("--model needs --cluster with a kind of GPU, as in --cluster 8xA100-80GB")
    from dsplan.planner.estimating import estimate
    from dsplan.planner.load import load_subject
    from dsplan.planner.settings import Flags

    subject, gpu = load_subject(model), cluster.gpu

    def fit(raw: dict[str, Any]) -> Fit | str:
        try:
            row = estimate(subject, cluster=cluster, config=raw, args=args, flags=Flags(engine=engine)).rows[0]  # type: ignore[arg-type]
        except Problem as problem:
            return f"what estimate can take ({problem})"
        memory = row.memory
        if memory.device_bytes is None or memory.device_bytes_high is None:
            return "a sample batch of the model"
        return Fit(
            gpu=gpu.name,
            device_bytes=memory.device_bytes,
            device_bytes_high=memory.device_bytes_high,
            usable_bytes=gpu.usable_bytes,
        )

    return fit


def _companion(args: str | None) -> Companion | None:
    if args is None:
        return None
    from dsplan.schemas.companion import read_companion

    return read_companion(args)


def _filled(companion: Companion) -> dict[str, Any]:
    """What stands in the place of "auto", by pointer."""
    values = {
        "/train_micro_batch_size_per_gpu": companion.micro_batch,
        "/gradient_accumulation_steps": companion.accumulation,
        "/gradient_clipping": companion.gradient_clipping,
        "/zero_optimization/stage": companion.zero_stage,
        "/fp16/enabled": companion.precision and companion.precision == "fp16",
        "/bf16/enabled": companion.precision and companion.precision == "bf16",
    }
    return {pointer: value for pointer, value in values.items() if value is not None}


def _finding(rule: Rule, hit: Hit, document: Document | None, reader: Reader) -> Finding:
    return Finding(
        rule=rule.id,
        name=rule.name,
        severity=hit.severity or rule.severity,
        pointer=hit.pointer,
        span=hit.span or _span(document, hit),
        message=hit.message,
        about=reader,
        remedy=hit.remedy,
        fix=hit.fix,
        raises=_raises(rule, hit),
    )


def _raises(rule: Rule, hit: Hit) -> Moment | None:
    moment = hit.raises or rule.raises
    return None if moment == "never" else moment


def _span(document: Document | None, hit: Hit) -> Span:
    """Where to point: the key or the value; for what is not there, the nearest block around it that is."""
    assert document is not None
    pointer = hit.pointer
    if hit.on_key and pointer in document.keys_at:
        return document.key_span(pointer)
    if pointer and pointer in document.values_at:
        return document.span(pointer)
    while pointer and pointer not in document.keys_at:
        pointer = pointer.rpartition("/")[0]
    if pointer:
        return document.key_span(pointer)
    start, end = document.values_at.get("", (0, 0))
    return document.lines.span(start, min(start + 1, end))


def _texts(paths: Sequence[str]) -> Iterator[tuple[str, str]]:
    seen: set[str] = set()
    for path in paths:
        if path == STDIN:
            yield STDIN, decode(sys.stdin.buffer.read(), "standard input")
        elif Path(path).is_dir():
            below = list(_configs_below(Path(path)))
            if not below:
                raise Problem(f"{path}: no *.json below it looks like a DeepSpeed configuration; name the file itself")
            for name, text in below:
                if name not in seen:
                    seen.add(name)
                    yield name, text
        elif path not in seen:
            seen.add(path)
            yield path, read_text(path)


def _configs_below(folder: Path) -> Iterator[tuple[str, str]]:
    for file in sorted(folder.rglob("*.json")):
        inside = file.relative_to(folder).parts[:-1]
        if any(part.startswith(".") or part in _SKIPPED_FOLDERS for part in inside) or not file.is_file():
            continue
        try:
            if file.stat().st_size > 1_000_000:
                continue
            text = read_text(file)
        except (Problem, OSError):
            continue
        if looks_like_config(text, file.name):
            yield str(file), text


def looks_like_config(text: str, name: str) -> bool:
    """The text is that of a DeepSpeed configuration; one that cannot be read, by its name or the keys in it."""
    if not any(key in text for key in ("batch_size", "zero_opti", "fp16", "bf16", "gradient_")):
        return False
    own = {"train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization"}
    try:
        value = read_document(text, "hjson").value
    except SyntaxProblem:
        return name.startswith("ds_") or "deepspeed" in name or "ds_config" in name or any(key in text for key in own)
    if not isinstance(value, dict) or {"model_type", "architectures", "layout", "$defs"} & value.keys():
        return False
    blocks = [key for key, entry in value.items() if isinstance(entry, dict) and key in schema()["properties"]]
    return any(key in own for key in value) or len(blocks) >= 2 or bool(lookup("/fp16") and "fp16" in blocks)
