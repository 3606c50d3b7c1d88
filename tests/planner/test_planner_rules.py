"""Every rule's docstring is its page and its first tests: Bad triggers it alone, Good is silent, the fix is a fix."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from dsplan.planner.auditing.fixing import fix_text
from dsplan.planner.commands.docs import stale
from dsplan.planner.rules import RULES, Rule
from dsplan.reports import rule_page
from dsplan.schemas.known_keys import lookup
from rule_examples import linted

EVERY = pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.id)
FIXED = pytest.mark.parametrize(
    "rule", [rule for rule in RULES.values() if rule.fix != "none"], ids=lambda rule: rule.id
)


@EVERY
def test_a_rule_has_a_whole_page(rule: Rule) -> None:
    assert re.fullmatch(r"DSP\d{3}", rule.id)
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", rule.name)
    assert rule.summary.endswith(".")
    for heading in ("Why", "Bad", "Good", "Source"):
        assert rule.section(heading), heading
    assert rule.fix in ("safe", "unsafe", "none")


@EVERY
def test_the_keys_of_a_rule_are_keys_of_deepspeed(rule: Rule) -> None:
    assert [key for key in rule.keys if lookup(key) is None] == []


@EVERY
def test_bad_triggers_the_rule_and_no_other(rule: Rule) -> None:
    for bad in rule.section("Bad"):
        found = linted(rule, bad).findings
        assert rule.id in [finding.rule for finding in found]
        others = [finding for finding in found if finding.rule != rule.id and finding.severity != "info"]
        assert others == []


@EVERY
def test_bad_has_the_severity_of_the_page(rule: Rule) -> None:
    first = next(finding for finding in linted(rule, rule.section("Bad")[0]).findings if finding.rule == rule.id)
    assert first.severity == rule.severity


@EVERY
def test_good_is_silent(rule: Rule) -> None:
    for good in rule.section("Good"):
        assert linted(rule, good).findings == ()


@FIXED
def test_the_fix_of_bad_is_silent_and_idempotent(rule: Rule) -> None:
    bad = linted(rule, rule.section("Bad")[0])
    fix = next(finding.fix for finding in bad.findings if finding.rule == rule.id)
    assert fix is not None
    assert fix.safe == (rule.fix == "safe")
    fixed = fix_text(bad, unsafe=True)
    again = linted(rule, fixed)
    assert [finding for finding in again.findings if finding.severity != "info"] == []
    assert fix_text(again, unsafe=True) == fixed


@EVERY
def test_a_rule_without_a_fix_offers_none(rule: Rule) -> None:
    if rule.fix == "none":
        for bad in rule.section("Bad"):
            assert [found.fix for found in linted(rule, bad).findings if found.rule == rule.id and found.fix] == []


def test_the_pages_of_docs_rules_are_current_and_none_is_left_over() -> None:
    folder = Path(__file__).parents[2] / "docs" / "rules"
    assert stale(rule_page.documents(list(RULES.values())), folder) == []


def test_ids_are_in_order_and_names_are_unique() -> None:
    assert list(RULES) == sorted(RULES)
    assert len({rule.name for rule in RULES.values()}) == len(RULES)
