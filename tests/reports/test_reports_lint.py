"""Reports of lint: JSON to the letter of its contract, workflow commands, and text that a terminal can bear."""

from __future__ import annotations

import json
import re

from dsplan.planner.auditing.linting import lint_text
from dsplan.planner.rules import RULES
from dsplan.reports import as_github, as_json, as_text, rule_page

TEXT = '{\n  "train_batch_size": 8, "gradient_clipping": 1.0,\n  "zero_optimisation": {"stage": 1}\n}'


def test_json_is_the_contract() -> None:
    report = json.loads(as_json.findings([lint_text(TEXT, "a.json")]))
    assert report.keys() == {"version", "files"}
    (file,) = report["files"]
    assert file.keys() == {"file", "read_as", "findings", "skipped_rules"}
    assert file["read_as"] == "deepspeed"
    assert all(skipped.keys() == {"rule", "needs"} for skipped in file["skipped_rules"])
    (finding,) = file["findings"]
    message = finding.pop("message")
    assert "zero_optimization" in message
    assert finding == {
        "rule": "DSP001",
        "name": "unknown-key",
        "severity": "error",
        "pointer": "/zero_optimisation",
        "line": 3,
        "column": 3,
        "end_line": 3,
        "end_column": 22,
        "about": "deepspeed",
        "fix": "safe",
        "raises": None,
    }


def test_github_commands_escape_what_would_end_them() -> None:
    line = as_github.findings([lint_text('{"train_batch_size": 8, "gradient_clipping": 1, "a%,:\\n": 1}', "d,:%.json")])
    assert line == (
        "::warning file=d%2C%3A%25.json,line=1,endLine=1,col=49,endColumn=57,title=DSP001 unknown-key"
        '::unknown key "a%25,:\\n"; DeepSpeed ignores it'
    )


def test_text_has_place_snippet_caret_and_count() -> None:
    *shown, last = as_text.findings([lint_text(TEXT, "a.json")]).splitlines()
    assert shown == [
        'a.json:3:3: error: unknown key "zero_optimisation"; did you mean "zero_optimization"? DeepSpeed ignores it, so '
        "zero_stage is 0 [DSP001 unknown-key]",
        "  |",
        '3 |   "zero_optimisation": {"stage": 1}',
        '  |   ^~~~~~~~~~~~~~~~~~~ write "zero_optimization"',
    ]
    assert re.fullmatch(
        r"1 error in 1 file, read as DeepSpeed 0\.19\.8 reads it \(\d+ rules skipped: pass --args, --cluster, --model\); 1 fixable with --fix",
        last,
    )


def test_the_caret_stands_under_its_character_after_tabs_and_wide_ones() -> None:
    lines = as_text.findings([lint_text('{\n\t"名": 1, "train_batch_size": 0, "gradient_clipping": 1}')]).splitlines()
    shown = next(line for line in lines if line.startswith("2 |") and "train" in line)
    caret = next(line for line in lines[::-1] if line.startswith("  |") and "^" in line)
    assert caret.index("^") == shown.index(" 0,") + 1 + 1  # one more: the wide character takes two columns


def test_text_never_passes_control_characters_on() -> None:
    text = as_text.findings(
        [lint_text('{"train_batch_size": 8, "\\u001b[31m": 1, "x\u202e": \'y\x1b[2J\'}', "a\x1b.json")]
    )
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_color_only_where_it_is_asked_for() -> None:
    found = [lint_text(TEXT)]
    assert "\033[31merror\033[0m" in as_text.findings(found, color=True)
    assert "\033" not in as_text.findings(found)


def test_a_page_shows_every_section_of_the_rule() -> None:
    page = rule_page.page(RULES["DSP102"])
    assert page.startswith("DSP102 batch-product-mismatch (error)\n")
    for heading in ("Why:", "Given:", "Bad:", "Good:", "Fix:", "Source:"):
        assert f"\n{heading}\n" in page
    assert len(rule_page.listing(list(RULES.values())).splitlines()) == len(RULES)
    assert len(json.loads(rule_page.listing_json(list(RULES.values())))["rules"]) == len(RULES)
