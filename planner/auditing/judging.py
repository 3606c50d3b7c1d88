"""One source under one setting: what each rule says of it, and which rules could not speak."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dsplan.planner.auditing import project as projects
from dsplan.planner.auditing import suppressing
from dsplan.planner.auditing.choosing import check_known, chosen_rules
from dsplan.planner.auditing.meaning import meaning
from dsplan.planner.auditing.open_values import define, fillings, open_names
from dsplan.planner.auditing.reading import Reading, read
from dsplan.planner.auditing.releasing import NEWEST, released
from dsplan.planner.rules import RULES, Hit, Rule, holding, run
from dsplan.schemas.finding import FileFindings, Finding, Moment, Reader, SkippedRule, Span
from dsplan.schemas.known_keys import at_release
from dsplan.schemas.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dsplan.planner.auditing.filling import Filled
    from dsplan.planner.auditing.sources import Source
    from dsplan.planner.rules.fit import Fit
    from dsplan.planner.rules.models import ModelFacts
    from dsplan.schemas.cluster import Cluster
    from dsplan.schemas.companion import Companion
    from dsplan.schemas.positions import Document
    from dsplan.schemas.releases import Upgrade

NEEDS = {
    "cluster": "--cluster",
    "zero_stage": "--args",
    "companion": "--args",
    "fit": "--model",
    "model": "--model",
}
"""What a rule may need and the user can give, to the option that gives it."""
ZERO_STAGES = range(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """All beside the text that a finding may depend on."""

    cluster: Cluster | None
    reader: str
    engine: str
    rules: tuple[Rule, ...]
    companion: Companion | None
    fit: Fit | Callable[[dict[str, Any]], Fit | str] | None
    defines: Mapping[str, str]
    facts: ModelFacts | None = None
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    release: str | None = None
    """An earlier release of DeepSpeed, of those that were asked; None: the newest."""
    asked: bool = False
    """The options name the release."""
    upgrade: Upgrade | None = None
    project_of: Callable[[str], projects.Project | None] = projects.none
    project: projects.Project | None = None


def within(setting: Setting, project: projects.Project | None) -> Setting:
    """The setting, and what the project says where the options say nothing."""
    if project is None:
        return setting
    try:
        rules = chosen_rules(setting.select or project.select, setting.ignore or project.ignore)
        check_known(pattern for patterns in project.per_file_ignores.values() for pattern in patterns)
        named = project.deepspeed_version if not setting.asked else None
        release = released(named)[0] if named else setting.release
    except Problem as problem:
        raise Problem(f"{project.file}: {problem}") from problem
    return replace(
        setting,
        cluster=setting.cluster or project.cluster,
        reader=project.reader if project.reader and setting.reader == "auto" else setting.reader,
        rules=tuple(rules),
        release=release,
        project=project,
    )


def lint_source(source: Source, setting: Setting) -> FileFindings:
    """The findings of one source, with the keys of the setting's release."""
    setting = within(setting, setting.project_of(source.path))
    with at_release(setting.release):
        return _lint_source(source, setting)


def _lint_source(source: Source, setting: Setting) -> FileFindings:
    """Of a template, what any of its branches brings."""
    reading = read(source, setting.reader, setting.companion.kind if setting.companion else None)
    document = reading.document
    findings: list[Finding]
    skipped: list[SkippedRule]
    placeholders: tuple[str, ...] = ()
    if document is None:
        findings, skipped = _findings(reading, None, setting, {})
    else:
        documents = [document, *reading.others]
        placeholders = tuple(dict.fromkeys(name for one in documents for name in open_names(one)))
        spans = [one.values_at[at] for one in documents for at in one.open]
        documents = [define(one, setting.defines) for one in documents]
        open_values = _all_open(documents)
        open_values |= {text: at for one in documents for at, text in one.more.items()}
        first = next((one for one in documents if one.open or one.more), document)
        told_of = [_standing(reading, one, setting, open_values if one is first else {}) for one in documents]
        document, skipped = documents[0], told_of[0][1]
        findings = [finding for found, _ in told_of for finding in found]
        findings += _idle_suppressions(document, reading, setting, findings, skipped)
        if source.embedded is not None:  # edits are written for a configuration's own file
            spans = [(0, len(source.text))]
        findings = [_without_fix_over(spans, finding) for finding in findings]
    findings.sort(key=lambda finding: (finding.span.line, finding.span.column, finding.rule))
    patterns = [entry.pattern for entry in suppressing.own_entries(document)]
    patterns += setting.project.ignored_in(source.path) if setting.project else ()
    told, suppressed = suppressing.sifted(tuple(dict.fromkeys(findings)), patterns)
    return FileFindings(
        file=source.name,
        part=source.name.removeprefix(source.path),
        read_as=reading.read_as,
        text=source.text,
        release=setting.release or NEWEST,
        findings=told,
        skipped_rules=tuple(skipped),
        placeholders=placeholders,
        ran=frozenset(rule.id for rule in _heard(reading, setting, skipped)),
        suppressed=suppressed,
    )


def _all_open(documents: Sequence[Document]) -> dict[str, str]:
    """The open names of all documents, those of the first document that has any first."""
    names: dict[str, str] = {}
    for document in documents:
        names = {**names, **{name: at for name, at in open_names(document).items() if name not in names}}
    return names


def _standing(
    reading: Reading, document: Document, setting: Setting, open_values: Mapping[str, str]
) -> tuple[list[Finding], list[SkippedRule]]:
    """The findings that stand whatever the document's open values are."""
    tries = [_findings(reading, tried, setting, open_values) for tried in fillings(document)]
    common = set.intersection(*(set(found) for found, _ in tries))
    return [finding for finding in tries[0][0] if finding in common], tries[0][1]


def _without_fix_over(spans: Sequence[tuple[int, int]], finding: Finding) -> Finding:
    """The finding, without a fix that would write over one of the spans: what stands there is not ours to replace."""
    edits = finding.fix.edits if finding.fix else ()
    over = any(edit.start < end and start < max(edit.end, edit.start + 1) for edit in edits for start, end in spans)
    return replace(finding, fix=None) if over else finding


def _findings(
    reading: Reading, document: Document | None, setting: Setting, open_values: Mapping[str, str]
) -> tuple[list[Finding], list[SkippedRule]]:
    """What each rule says of the document, and the rules that could not speak."""
    needs = dict(NEEDS)
    context: dict[str, Any] = {"reader": reading.read_as}
    if setting.cluster is not None:
        context["cluster"] = setting.cluster
    else:
        context["world_size_unknown"] = True
    if setting.companion is not None:
        context["companion"] = setting.companion
    if document is not None:
        context["document"] = document
        filled = filled_of(document, setting.companion, setting.cluster) if setting.companion else {}
        if setting.companion:
            context["filled"] = filled
        context |= meaning(document, reading.read_as, {at: value.value for at, value in filled.items()})
        if reading.read_as != "deepspeed":
            context["hf_reader"] = reading.read_as
        if reading.elsewhere is not None:
            context["elsewhere"] = reading.elsewhere
        if reading.guessed:
            context["guessed"] = True
        if reading.broken is not None:
            context["broken_branch"] = reading.broken
        if setting.project is not None and setting.project.policies:
            context["policies"] = setting.project.policies
        if open_values:
            context["open_values"] = open_values
        if setting.engine in ("native", "both") and isinstance(document.value, dict):
            context["native"] = document.value
        if setting.facts is not None:
            context["model"] = setting.facts
        if setting.fit is not None and isinstance(document.value, dict):
            told = setting.fit(document.value) if callable(setting.fit) else setting.fit
            if isinstance(told, str):
                needs["fit"] = told
            else:
                context["fit"] = told
    else:
        context["syntax"] = reading.syntax
    if setting.release is not None:
        context["release"] = setting.release
    if setting.upgrade is not None:
        context["upgrade"] = setting.upgrade
    findings: list[Finding] = []
    skipped: list[SkippedRule] = []
    for rule in holding(setting.rules, setting.release):
        missing = [need for need in rule.needs if need not in context]
        if not missing:
            findings += [_finding(rule, hit, document, reading.read_as) for hit in run(rule, context)]
            continue
        if missing == ["zero_stage"] and "config" in context:  # an "auto" that nobody fills here: what any stage brings
            by_stage = [run(rule, {**context, "zero_stage": stage}) for stage in ZERO_STAGES]
            common = [hit for hit in by_stage[0] if all(hit in hits for hits in by_stage[1:])]
            findings += [_finding(rule, hit, document, reading.read_as) for hit in common]
            if all(hits == common for hits in by_stage):
                continue
        if document is not None and isinstance(document.value, dict) and all(need in needs for need in missing):
            skipped.append(SkippedRule(rule=rule.id, needs=" ".join(needs[need] for need in missing)))
    if document is not None and (setting.release is not None or setting.upgrade is not None):
        from dsplan.planner.rules.releases import told_once

        findings = told_once(document, findings)
    return findings, skipped


def _heard(reading: Reading, setting: Setting, skipped: Sequence[SkippedRule]) -> list[Rule]:
    """The rules that could have found something: not those of another reader, engine or release, nor the skipped."""
    by_option = {
        "native": setting.engine in ("native", "both"),
        "policies": setting.project is not None and bool(setting.project.policies),
        "hf_reader": reading.read_as != "deepspeed",
        "guessed": reading.guessed,
        "elsewhere": reading.elsewhere is not None,
        "release": setting.release is not None,
        "upgrade": setting.upgrade is not None,
        "world_size_unknown": setting.cluster is None,
        "document": reading.document is not None,
    }
    absent = {need for need, there in by_option.items() if not there}
    missing = {skip.rule for skip in skipped}
    rules = holding(setting.rules, setting.release)
    return [rule for rule in rules if rule.id not in missing and absent.isdisjoint(rule.needs)]


def _idle_suppressions(
    document: Document, reading: Reading, setting: Setting, findings: Sequence[Finding], skipped: Sequence[SkippedRule]
) -> list[Finding]:
    """What the file ignores in vain: judged once all other rules have spoken."""
    entries = suppressing.own_entries(document)
    if not entries:
        return []
    ran = [(rule.id, rule.name) for rule in _heard(reading, setting, skipped)]
    idle = suppressing.unused(entries, findings, ran, [(rule.id, rule.name) for rule in RULES.values()])
    context = {"idle_suppressions": idle}
    judges = [rule for rule in setting.rules if idle and rule.needs == ("idle_suppressions",)]
    return [_finding(rule, hit, document, reading.read_as) for rule in judges for hit in run(rule, context)]


def filled_of(document: Document, companion: Companion, cluster: Cluster | None) -> dict[str, Filled]:
    """What the companion's reader puts in the place of the document's "auto" values."""
    from dsplan.planner.auditing.filling import filled_values

    own = document.value if isinstance(document.value, dict) else {}
    ranks = None if cluster is None else cluster.ranks
    return filled_values(companion, ranks=ranks, stage=document.at("/zero_optimization/stage"), own=own)


def _finding(rule: Rule, hit: Hit, document: Document | None, reader: Reader) -> Finding:
    return Finding(
        rule=rule.id,
        name=rule.name,
        severity=hit.severity or rule.severity,
        pointer=hit.pointer,
        span=hit.span or _span(document, hit),
        message=hit.message,
        about=hit.about or reader,
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
