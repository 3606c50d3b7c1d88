"""Lint as a whole: which files, which reader, which rules, fixes; and that nothing makes it raise."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dsplan.planner.auditing import choosing
from dsplan.planner.auditing.fixing import Fixed, diff_of, fix_all, fix_text, write_fixes
from dsplan.planner.auditing.linting import lint, lint_text, linter
from dsplan.reports import as_github, as_json, as_text
from dsplan.schemas.cluster import parse_cluster
from dsplan.schemas.problem import Problem
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
CASES = sorted((ROOT / "tests" / "cases").iterdir())
GOOD = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "fp16": {"enabled": True, "loss_scale_window": 500},
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "reduce_bucket_size": 5e8},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
}


def rules_of(text: str, **given: Any) -> list[str]:
    return [finding.rule for finding in lint_text(text, **given).findings]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Path, monkeypatch: pytest.MonkeyPatch, update_golden: bool) -> None:
    """A folder of tests/cases: ds_config.json, what lint says of it, and maybe how it is called (options.json)."""
    monkeypatch.chdir(case)
    options = json.loads((case / "options.json").read_text("utf-8")) if (case / "options.json").exists() else {}
    cluster = parse_cluster(options.pop("cluster")) if "cluster" in options else None
    said = as_text.findings(lint(["ds_config.json"], cluster=cluster, **options))
    if update_golden:
        (case / "expected.out").write_text(said + "\n", "utf-8")
    assert said + "\n" == (case / "expected.out").read_text("utf-8")


def test_linting_imports_nothing_heavy() -> None:
    code = (
        "import sys, dsplan.planner.auditing.linting as l; l.lint([sys.argv[1]]); "
        "print([m for m in ('torch', 'numpy', 'jsonschema', 'pydantic', 'yaml', 'rich') if m in sys.modules])"
    )
    command = [sys.executable, "-c", code, str(ROOT / "examples" / "ds_config.json")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("text", "reader"),
    [
        ('{"train_batch_size": 8}', "deepspeed"),
        ('{"train_batch_size": "auto"}', "trainer"),
        ('{"train_batch_size": "auto",}', "deepspeed"),
        ('{"zero_optimization": {"overlap_comm": "auto"}}', "deepspeed"),
        ('{"train_batch_size": "auto", "zero_optimization": {"stage": "auto"}}', "accelerate"),
    ],
)
def test_the_reader_is_whoever_fills_auto(text: str, reader: str) -> None:
    assert lint_text(text).read_as == reader


def test_rules_that_lack_an_input_are_counted_with_what_they_need() -> None:
    alone, on_eight = (lint_text("{train_batch_size: 8}", cluster=gpus) for gpus in (None, parse_cluster("8")))
    assert {skipped.needs for skipped in alone.skipped_rules} == {"--args", "--args --cluster", "--cluster", "--model"}
    assert {skipped.needs for skipped in on_eight.skipped_rules} == {"--args", "--model"}
    needs = {skipped.rule: skipped.needs for skipped in alone.skipped_rules}
    assert (needs["DSP102"], needs["DSP034"], needs["DSP901"]) == ("--cluster", "--args --cluster", "--model")


def test_a_stage_that_nobody_fills_hides_nothing_that_holds_at_every_stage() -> None:
    text = """{"train_batch_size": 8, "gradient_clipping": 1.0, "fp16": {"enabled": true, "initial_scale_power": 32},
      "zero_optimization": {"stage": "auto", "offload_param": {"device": "cpu"}}}"""
    found = lint_text(text, reader="accelerate")
    assert [finding.rule for finding in found.findings] == ["DSP215"]
    needs = {skipped.rule: skipped.needs for skipped in found.skipped_rules}
    assert needs["DSP401"] == "--args" and "DSP215" not in needs


def test_select_and_ignore_take_ids_names_and_beginnings() -> None:
    chosen = [rule.id for rule in choosing.chosen_rules(["DSP1", "unknown-key"], ["DSP102"])]
    assert chosen == ["DSP001", "DSP101", "DSP103", "DSP104", "DSP105", "DSP106", "DSP107", "DSP108"]
    with pytest.raises(Problem, match="'DSP999' is no rule"):
        choosing.chosen_rules(["DSP999"], [])


@pytest.mark.parametrize(
    ("config", "ranks", "said"),
    [
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}, "8", "= 64"),
        ({"train_batch_size": 6}, "4", "dp 4 does not divide"),
        (
            {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4},
            "1",
            "micro_batch 4 x dp 1 = 4 does not divide",
        ),
        ({"train_batch_size": 8, "gradient_accumulation_steps": 3}, "2", "accumulation 3 x dp 2 = 6 does not divide"),
    ],
)
def test_the_batch_equation(config: dict[str, int], ranks: str, said: str) -> None:
    found = [
        finding
        for finding in lint_text(json.dumps(config), cluster=parse_cluster(ranks)).findings
        if finding.rule == "DSP102"
    ]
    assert len(found) == 1
    assert said in found[0].message


def test_the_batch_equation_divides_by_sequence_parallel_size() -> None:
    text = '{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "sequence_parallel_size": 2}'
    assert "DSP102" not in rules_of(text, cluster=parse_cluster("4"))
    assert "DSP106" in rules_of(text, cluster=parse_cluster("8"))


def test_fixes_keep_comments_layout_and_line_ends(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    before = '{\r\n  // ours\r\n  "train_batch_size": 8,   "gradient_clipping": 1,\r\n  "zero_optimisation": {"stage": 1}, # z\r\n}\r\n'
    file.write_bytes(before.encode())
    found = lint([str(file)])
    assert '+  "zero_optimization": {"stage": 1}, # z' in diff_of(found, linter())
    assert file.read_bytes() == before.encode()
    assert write_fixes(found, linter()).count == 1
    assert file.read_bytes() == before.replace("optimisation", "optimization").encode()
    assert write_fixes(lint([str(file)]), linter()).count == 0


def test_folders_are_searched_for_what_looks_like_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "zero2.json").write_text('{"train_batch_size": 8}')
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": []}')
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "ds_config.json").write_text('{"train_batch_size": 8}')
    assert [found.file for found in lint([str(tmp_path)])] == [str(tmp_path / "a" / "zero2.json")]
    (tmp_path / "empty").mkdir()
    with pytest.raises(Problem, match="looks like a DeepSpeed configuration"):
        lint([str(tmp_path / "empty")])


@pytest.mark.parametrize("content", [b"\xff\xfe{", b"\x89PNG\r\n\x1a\n\x00", b'{"a": "\xe9"}'])
def test_what_is_no_text_is_one_clear_line(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "ds.json"
    file.write_bytes(content)
    with pytest.raises(Problem) as caught:
        lint([str(file)])
    assert "\n" not in str(caught.value)
    with pytest.raises(Problem, match="cannot be read"):
        lint([str(tmp_path / "missing.json")])


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "DSP009"),
        ("[1]", "DSP009"),
        ("null", "DSP009"),
        ('{"a": ', "DSP000"),
        ('{"gradient_clipping": NaN}', "DSP000"),
        ("[" * 5000, "DSP000"),
        ('{"train_batch_size": 1e400}', "DSP000"),
    ],
)
def test_what_is_no_configuration_is_a_finding(text: str, rule: str) -> None:
    assert rule in rules_of(text)


SCRAPS: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1.5,
    10**30,
    "auto",
    "false",
    "",
    [],
    {},
    [1],
    {"enabled": "x"},
    {"a": None},
    "cpu",
]


@st.composite
def mutated(draw: st.DrawFn) -> str:
    """A right configuration with one to three members of any block dropped, renamed or given a strange value."""
    config = json.loads(json.dumps(GOOD))
    for _ in range(draw(st.integers(1, 3))):
        block: Any = config
        while True:
            if not block:
                break
            key = draw(st.sampled_from(sorted(block)))
            if isinstance(block[key], dict) and draw(st.booleans()):
                block = block[key]
                continue
            action = draw(st.sampled_from(["drop", "rename", "replace", "add"]))
            if action == "drop":
                del block[key]
            elif action == "rename":
                block[draw(st.text(max_size=8)) + key[1:]] = block.pop(key)
            elif action == "add":
                block[draw(st.sampled_from(["lr", "stage", "/", "~", "cpu_offload", "bfloat16", "amp", "type"]))] = (
                    copy.deepcopy(draw(st.sampled_from(SCRAPS)))
                )
            else:
                block[key] = copy.deepcopy(draw(st.sampled_from(SCRAPS)))
            break
    text = json.dumps(config, indent=draw(st.sampled_from([None, 2])))
    if draw(st.booleans()):
        cut = draw(st.integers(0, len(text)))
        text = (
            text[:cut]
            + draw(st.sampled_from(["", "'", "}", ",", "\n", "#", "True", "\x00"]))
            + text[cut + draw(st.integers(0, 3)) :]
        )
    return text


@settings(max_examples=250, deadline=None)
@given(
    mutated(),
    st.sampled_from([None, "1", "8"]),
    st.sampled_from(["auto", "deepspeed", "trainer", "accelerate"]),
    st.sampled_from(["deepspeed", "native"]),
)
def test_nothing_makes_lint_or_a_report_raise(text: str, ranks: str | None, reader: str, engine: str) -> None:
    cluster = parse_cluster(ranks) if ranks else None
    found = lint_text(text, cluster=cluster, reader=reader, engine=engine)
    assert as_text.findings([found]).count("\n") >= len(found.findings)
    assert json.loads(as_json.findings([found]))["version"] == 1
    as_github.findings([found])
    fixed = fix_text(found)
    again = lint_text(fixed, cluster=cluster, reader=reader, engine=engine)
    new = {finding.rule for finding in again.findings if finding.severity == "error"}
    before = {finding.rule for finding in found.findings}
    if fixed == text:
        assert again == found
    else:
        assert "DSP000" not in new - before


def test_fixes_that_wait_for_each_other_are_all_applied_at_once(tmp_path: Path) -> None:
    text = '{"train_batch_size": 32, "gradient_cliping": 1.0, "zero_optimisation": {"stage": 2, "overlap_com": true}}'
    fixed = fix_all(lint_text(text), linter())
    wanted = (
        '{"train_batch_size": 32, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2, "overlap_comm": true}}'
    )
    assert (fixed.text, fixed.count) == (wanted, 3)
    assert fix_all(lint_text(wanted), linter()) == Fixed(wanted, 0, ())


def test_a_fix_that_would_bring_a_finding_is_held_back_alone() -> None:
    """The block's name mended, DeepSpeed would read its stage 7 and refuse it."""
    text = '{"train_batch_size": 8, "zero_optimisation": {"stage": 7}, "gradient_cliping": 1.0, "steps_per_prints": 5}'
    fixed = fix_all(lint_text(text), linter())
    assert fixed.text == text.replace("gradient_cliping", "gradient_clipping").replace("_prints", "_print")
    assert [finding.pointer for finding in fixed.held_back] == ["/zero_optimisation"]
    before = {(finding.rule, finding.pointer) for finding in lint_text(text).findings}
    assert {(finding.rule, finding.pointer) for finding in lint_text(fixed.text).findings} < before


def test_a_folder_holds_back_no_broken_configuration(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text('{"zero_optimization": {"stage": 2}', "utf-8")
    (tmp_path / "other.json").write_text("{broken", "utf-8")
    (found,) = lint([str(tmp_path)])
    assert found.file.endswith("broken.json")
    assert [finding.rule for finding in found.findings] == ["DSP000"]


def test_rules_that_cancel_each_other_out_are_refused() -> None:
    with pytest.raises(Problem, match="leave no rule"):
        linter(select=["DSP001"], ignore=["DSP001"])


def test_a_fix_that_another_one_makes_welcome_is_applied_in_the_same_call() -> None:
    """cpu_offload moves once it is a switch: both in one call, so that a second one changes nothing."""
    text = '{"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2, "cpu_offload": 1.0}}'
    fixed = fix_all(lint_text(text, reader="trainer"), linter(reader="trainer"))
    again = fix_all(lint_text(fixed.text, reader="trainer"), linter(reader="trainer"))
    assert (again.text, again.count) == (fixed.text, 0)
