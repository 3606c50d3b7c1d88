"""Lint's reports for machines: each to the letter of what its reader documents, whatever the names and texts hold."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from dsplan.planner.auditing.linting import lint_text
from dsplan.planner.rules import RULES
from dsplan.reports import as_github, as_gitlab, as_json, as_junit, as_markdown, as_sarif, as_text
from dsplan.reports.places import relative, uri_of
from dsplan.schemas.finding import Edit, FileFindings, Finding, Fix, SkippedRule, Span

TESTS = Path(__file__).parents[1]
RULE_LIST = list(RULES.values())
TEXT = '{\n  "名": 1, "a|b<c": "x"\n}\n'


def finding(**other: Any) -> Finding:
    """A finding in line 2, on the key after the wide character."""
    usual: dict[str, Any] = {
        "rule": "DSP001",
        "name": "unknown-key",
        "severity": "error",
        "pointer": "/a|b<c",
        "span": Span(line=2, column=11, end_line=2, end_column=18),
        "message": 'unknown key "a|b<c"; *what* is _it_, 100%?',
        "about": "deepspeed",
    }
    return Finding(**usual | other)


AWKWARD = FileFindings(
    file="dir with space/ds:50%,ä&\x1b.json",
    read_as="deepspeed",
    text=TEXT,
    findings=(
        finding(remedy='write "ab"', fix=Fix(safe=True, edits=(Edit(start=12, end=19, text='"ab"'),))),
        finding(),  # the same rule at the same place
        finding(
            rule="DSP202",
            name="clipping-by-default",
            severity="warning",
            pointer="",
            span=Span(line=1, column=1, end_line=3, end_column=2),
            message="two\nlines, ]]> and \x00 \x1b[31m",
        ),
        finding(rule="DSP019", name="not-configured", severity="info", message="good to know"),
    ),
    skipped_rules=(SkippedRule(rule="DSP102", needs="--cluster"), SkippedRule(rule="DSP901", needs="--model")),
)
CLEAN = FileFindings(file="clean.json", read_as="trainer", text="{}", findings=())
INSIDE = FileFindings(
    file="train.yaml#/deepspeed", part="#/deepspeed", read_as="trainer", text=TEXT, findings=(finding(),)
)
FILES = [AWKWARD, CLEAN, INSIDE]


def sarif(files: list[FileFindings]) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(as_sarif.findings(files, RULE_LIST, "1.2.3"))
    return report


@pytest.mark.parametrize("files", [[], [CLEAN], FILES], ids=["none", "clean", "awkward"])
def test_sarif_is_valid_by_the_schema_of_oasis(files: list[FileFindings]) -> None:
    schema = json.loads((TESTS / "published" / "sarif-schema-2.1.0.json").read_text("utf-8"))
    validator = jsonschema.Draft4Validator(schema, format_checker=jsonschema.FormatChecker())
    assert [error.message for error in validator.iter_errors(sarif(files))] == []


def test_sarif_of_real_findings_is_valid_and_each_points_at_its_rule() -> None:
    schema = json.loads((TESTS / "published" / "sarif-schema-2.1.0.json").read_text("utf-8"))
    found = [lint_text(bad, rule.id) for rule in RULE_LIST for bad in rule.section("Bad")]
    report = sarif(found)
    assert list(jsonschema.Draft4Validator(schema).iter_errors(report)) == []
    (run,) = report["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == list(RULES)
    assert len(run["results"]) == sum(len(file.findings) for file in found) > len(RULES) / 2
    assert all(rules[result["ruleIndex"]]["id"] == result["ruleId"] for result in run["results"])


def test_sarif_says_where_and_how_to_mend_it() -> None:
    (run,) = sarif(FILES)["runs"]
    assert run["columnKind"] == "unicodeCodePoints"
    assert run["newlineSequences"] == ["\r\n", "\n", "\r"]  # as schemas/positions.py counts lines
    assert run["tool"]["driver"]["version"] == "1.2.3"
    assert [result["level"] for result in run["results"]] == ["error", "error", "warning", "note", "error"]
    place = run["results"][0]["locations"][0]["physicalLocation"]
    assert place["artifactLocation"] == {"uri": "dir%20with%20space/ds%3A50%25%2C%C3%A4%26%1B.json"}
    assert place["region"] == {"startLine": 2, "startColumn": 11, "endLine": 2, "endColumn": 18}
    (fix,) = run["results"][0]["fixes"]
    (change,) = fix["artifactChanges"]
    assert change["artifactLocation"] == place["artifactLocation"]
    assert change["replacements"] == [{"deletedRegion": place["region"], "insertedContent": {"text": '"ab"'}}]
    assert run["results"][4]["locations"][0]["physicalLocation"]["artifactLocation"] == {"uri": "train.yaml"}
    skipped = [note["message"]["text"] for note in run["invocations"][0]["toolExecutionNotifications"]]
    assert skipped == ["DSP102 skipped: it needs --cluster", "DSP901 skipped: it needs --model"]


def test_fingerprints_tell_findings_apart_and_outlive_a_moved_line() -> None:
    prints = [result["partialFingerprints"]["rulePointer/v1"] for result in sarif([AWKWARD])["runs"][0]["results"]]
    assert len(set(prints)) == len(prints) == 4
    lower = lint_text('\n\n{"train_batch_size": 8, "gradient_cliping": 1}', "a.json")
    upper = lint_text('{"train_batch_size": 8, "gradient_cliping": 1}', "a.json")
    assert [entry["fingerprint"] for entry in json.loads(as_gitlab.findings([lower]))] == [
        entry["fingerprint"] for entry in json.loads(as_gitlab.findings([upper]))
    ]


@pytest.mark.parametrize("parts", [("#/a", "#/b"), ("#ds:1", "#ds:9")], ids=["two parts", "two dicts of a name"])
def test_fingerprints_tell_parts_of_a_file_apart(parts: tuple[str, str]) -> None:
    files = [
        FileFindings(file=f"t.py{part}", part=part, read_as="trainer", text=TEXT, findings=(finding(),))
        for part in parts
    ]
    prints = [result["partialFingerprints"]["rulePointer/v1"] for result in sarif(files)["runs"][0]["results"]]
    assert len(set(prints)) == 2
    assert len({entry["fingerprint"] for entry in json.loads(as_gitlab.findings(files))}) == 2


def test_fingerprints_of_a_dict_outlive_a_moved_line() -> None:
    def prints(line: int) -> list[str]:
        part = f"#ds:{line}"
        file = FileFindings(file=f"t.py{part}", part=part, read_as="trainer", text=TEXT, findings=(finding(),))
        sarifs = [result["partialFingerprints"]["rulePointer/v1"] for result in sarif([file])["runs"][0]["results"]]
        return sarifs + [entry["fingerprint"] for entry in json.loads(as_gitlab.findings([file]))]

    assert prints(3) == prints(30)


def test_a_rule_in_sarif_has_its_page() -> None:
    rule = next(rule for rule in sarif([])["runs"][0]["tool"]["driver"]["rules"] if rule["id"] == "DSP102")
    assert rule["name"] == "batch-product-mismatch"
    assert rule["defaultConfiguration"] == {"level": "error"}
    assert rule["shortDescription"]["text"].endswith(".")
    assert rule["fullDescription"]["text"].startswith(rule["shortDescription"]["text"])
    assert "```json" in rule["help"]["markdown"] and "Bad:" in rule["help"]["text"]


def test_gitlab_has_the_fields_of_its_page() -> None:
    """docs.gitlab.com, Code Quality report format."""
    report = json.loads(as_gitlab.findings(FILES))
    assert [entry["severity"] for entry in report] == ["major", "major", "minor", "info", "major"]
    assert len({entry["fingerprint"] for entry in report}) == len(report)
    assert {frozenset(entry) for entry in report} == {
        frozenset({"description", "check_name", "fingerprint", "severity", "location"})
    }
    assert report[0]["location"] == {"path": AWKWARD.file, "lines": {"begin": 2, "end": 2}}
    assert report[0]["check_name"] == "unknown-key"
    assert report[4]["location"]["path"] == "train.yaml"
    assert json.loads(as_gitlab.findings([CLEAN])) == []


def test_junit_counts_what_it_holds_and_any_parser_takes_it() -> None:
    root = ET.fromstring(as_junit.findings(FILES))
    assert root.tag == "testsuites"
    assert [suite.get("name") for suite in root] == [
        "dir with space/ds:50%,ä&\N{REPLACEMENT CHARACTER}.json",
        "clean.json",
        "train.yaml#/deepspeed",
    ]
    for suite in root:
        cases = suite.findall("testcase")
        assert int(suite.get("tests", "")) == len(cases) > 0
        assert int(suite.get("failures", "")) == len(suite.findall("testcase/failure"))
        assert int(suite.get("skipped", "")) == len(suite.findall("testcase/skipped"))
        assert all(case.get("name") and case.get("classname") == suite.get("name") for case in cases)
    awkward, clean, _ = root
    assert [failure.get("type") for failure in awkward.findall("testcase/failure")] == ["error", "error", "warning"]
    assert awkward.findall("testcase/failure")[2].get("message") == (
        "two lines, ]]> and \N{REPLACEMENT CHARACTER} \N{REPLACEMENT CHARACTER}[31m"
    )
    assert [skipped.get("message") for skipped in awkward.findall("testcase/skipped")] == [
        "it needs --cluster",
        "it needs --model",
    ]
    assert [case.get("name") for case in clean] == ["no findings"]


def test_github_names_the_file_and_gives_columns_of_one_line_only() -> None:
    first, _, third, fourth, inside = as_github.findings(FILES).splitlines()
    name = "dir with space/ds%3A50%25%2Cä&\N{REPLACEMENT CHARACTER}.json"
    assert first == (
        f"::error file={name},line=2,endLine=2,col=11,endColumn=18,title=DSP001 unknown-key"
        '::unknown key "a|b<c"; *what* is _it_, 100%25?; write "ab"'
    )
    assert third.startswith(f"::warning file={name},line=1,endLine=3,title=DSP202 clipping-by-default::two lines")
    assert fourth.startswith("::notice ")
    assert "file=train.yaml," in inside


@pytest.mark.parametrize("name", ["markdown", "statistics"])
def test_what_people_read(name: str, update_golden: bool) -> None:
    text = as_markdown.findings(FILES) if name == "markdown" else as_text.statistics(FILES)
    golden = TESTS / "golden" / f"lint_{name}.txt"
    if update_golden:
        golden.write_text(text + "\n", "utf-8")
    assert text + "\n" == golden.read_text("utf-8")


def test_markdown_rows_have_four_cells_each() -> None:
    rows = [line for line in as_markdown.findings(FILES).splitlines() if line.startswith("|")]
    assert len(rows) == 2 * 2 + 5
    assert {line.replace("\\|", "").count("|") for line in rows} == {5}


def test_statistics_count_by_rule_the_most_frequent_first() -> None:
    report = json.loads(as_json.statistics(FILES))
    assert list(report["statistics"].items()) == [("DSP001", 3), ("DSP019", 1), ("DSP202", 1)]
    assert report["files"] == json.loads(as_json.findings(FILES))["files"]


def test_paths_are_told_from_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert relative(str(tmp_path / "a" / "ds.json")) == "a/ds.json"
    assert relative("./a/ds.json") == "a/ds.json"
    assert relative("/elsewhere/ds.json") == "/elsewhere/ds.json"
    assert uri_of("/else where/ds.json") == "file:///else%20where/ds.json"
    assert uri_of("a\udcff.json") == "a%FF.json"
