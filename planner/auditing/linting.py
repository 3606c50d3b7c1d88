"""Lint: files in, findings out. Imports neither torch nor anything else that is heavy.

sources.py finds the texts, reading.py reads them, judging.py asks the rules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from dsplan.planner.auditing import project as projects
from dsplan.planner.auditing.choosing import chosen_rules
from dsplan.planner.auditing.judging import Setting, lint_source, within
from dsplan.planner.auditing.releasing import released
from dsplan.planner.auditing.sources import Source, sources
from dsplan.planner.rules import RULES, Rule
from dsplan.planner.rules.fit import Fit
from dsplan.schemas.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from dsplan.planner.models.load import Subject
    from dsplan.planner.rules.models import ModelFacts
    from dsplan.schemas.cluster import Cluster
    from dsplan.schemas.companion import Companion
    from dsplan.schemas.finding import FileFindings, Reader
    from dsplan.schemas.releases import Upgrade

__all__ = ["Setting", "lint", "lint_source", "lint_text", "linter", "setting_of"]


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
    defines: Mapping[str, str] | None = None,
    release: str | None = None,
    before: str | None = None,
) -> list[FileFindings]:
    """The findings of each configuration, in the order of the paths (see sources.py). Problem where a text cannot be had.

    reader auto: whose companion it is, or whoever fills the file's "auto" values, else DeepSpeed. engine native or both:
    also what the native engine does not carry out. release: the DeepSpeed that will read the file; None: the installed one,
    else the newest that is known. before: the one that reads it now, to be told what changes.
    """
    setting = setting_of(
        cluster=cluster,
        reader=reader,
        engine=engine,
        args=args,
        model=model,
        select=select,
        ignore=ignore,
        defines=defines,
        release=release,
        before=before,
    )
    found = [lint_source(source, setting) for source in sources(paths)]
    _check_defines(setting.defines, found)
    return found + projects.idle_ignores(
        found, paths, lambda project: [(rule.id, rule.name) for rule in within(setting, project).rules]
    )


def _check_defines(defines: Mapping[str, str], found: Sequence[FileFindings]) -> None:
    """Problem where a name that is defined is no placeholder of any file."""
    known = dict.fromkeys(name for file in found for name in file.placeholders)
    for name in defines:
        if name not in known:
            has = f"; there is {', '.join(list(known)[:12])}" if known else ""
            raise Problem(f"--define {name}: no placeholder is called so{has}")


def linter(**options: Any) -> Callable[[str, str], FileFindings]:
    """A function from (text, name) to its findings under the options of `lint`: for what lints a text again after a fix."""
    setting = setting_of(**options)
    return lambda text, name: lint_source(Source(name, text, name), setting)


def setting_of(
    *,
    cluster: Cluster | None = None,
    reader: str = "auto",
    engine: str = "deepspeed",
    args: str | None = None,
    model: str | None = None,
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    defines: Mapping[str, str] | None = None,
    release: str | None = None,
    before: str | None = None,
) -> Setting:
    """What the options say, loaded: rules, companion, model. Problem where one of them cannot be had."""
    asked = release is not None or before is not None
    release, upgrade = released(release, before)
    fit, facts = _of_model(model, cluster, args, engine) if model is not None else (None, None)
    return Setting(
        cluster=cluster,
        reader=reader,
        engine=engine,
        rules=tuple(chosen_rules(select, ignore)),
        select=tuple(select),
        ignore=tuple(ignore),
        project_of=projects.finder(),
        companion=_companion(args),
        fit=fit,
        facts=facts,
        defines=defines or {},
        release=release,
        asked=asked,
        upgrade=upgrade,
    )


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
    facts: ModelFacts | None = None,
    defines: Mapping[str, str] | None = None,
    project: projects.Project | None = None,
    release: str | None = None,
    upgrade: Upgrade | None = None,
) -> FileFindings:
    """The findings of one text. The companion says what the reader puts in the place of "auto".

    fit: what the configuration takes on the GPUs, or the function that tells it (or why it cannot). facts: what the model is.
    defines: what fills the placeholders of a template. release: an earlier DeepSpeed that reads it (one that was asked).
    """
    setting = Setting(
        cluster=cluster,
        reader=reader,
        engine=engine,
        rules=tuple(RULES.values() if rules is None else rules),
        companion=companion,
        fit=fit,
        facts=facts,
        defines=defines or {},
        release=release,
        asked=release is not None,
        upgrade=upgrade,
    )
    return lint_source(Source(name, text, name), within(setting, project))


def _of_model(
    model: str, cluster: Cluster | None, args: str | None, engine: str
) -> tuple[Callable[[dict[str, Any]], Fit | str], ModelFacts]:
    """A function from a file's object to what it takes on the cluster's GPUs, and what the model is. Loads both, and torch."""
    from dsplan.planner.auditing.model_facts import facts_of
    from dsplan.planner.models.load import load_subject

    subject = load_subject(model)
    return _fits(subject, cluster, args, engine), facts_of(model, subject)


def _fits(
    subject: Subject, cluster: Cluster | None, args: str | None, engine: str
) -> Callable[[dict[str, Any]], Fit | str]:
    """By `estimate`, where the cluster names a kind of GPU."""
    if cluster is None or cluster.gpu is None:
        return lambda raw: "--cluster with a kind of GPU, as 8xA100-80GB"
    from dsplan.planner.estimating import estimate
    from dsplan.planner.memory.device import host_phases
    from dsplan.planner.settings import Flags

    gpu = cluster.gpu

    def fit(raw: dict[str, Any]) -> Fit | str:
        try:
            row = estimate(subject, cluster=cluster, config=raw, args=args, flags=Flags(engine=engine)).rows[0]  # type: ignore[arg-type]
        except Problem as problem:
            return f"a configuration that dsplan estimate takes (it says: {problem})"
        memory = row.memory
        if memory.device_bytes is None or memory.device_bytes_high is None:
            return "a sample batch of the model"
        assert row.ledger is not None
        phase, host_bytes = max(host_phases(row.ledger, row.plan, cluster), key=lambda pair: pair[1])
        return Fit(
            gpu=gpu.name,
            device_bytes=memory.device_bytes,
            device_bytes_high=memory.device_bytes_high,
            usable_bytes=gpu.usable_bytes,
            host_phase=phase,
            host_bytes=host_bytes,
            host_memory_bytes=cluster.host_memory_bytes,
        )

    return fit


def _companion(args: str | None) -> Companion | None:
    if args is None:
        return None
    from dsplan.schemas.companion import read_companion

    return read_companion(args)
