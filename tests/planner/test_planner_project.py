"""Lint in teams: [tool.dsplan] of pyproject.toml, suppressions, policies, baselines; as the command line has them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command import Done, dsplan
from dsplan.planner.auditing.linting import lint_text
from dsplan.planner.auditing.project import _READ, _project, glob_matches, read_project
from dsplan.planner.options import with_baseline_file
from dsplan.schemas.problem import Problem
from hypothesis import given, settings
from hypothesis import strategies as st

PLAIN = '{"train_batch_size": 8, "gradient_clipping": 1.0}'
ODD = '{"train_batch_size": 8, "gradient_clipping": 1.0, "our_own": 1}'
"""DSP001 unknown-key, a warning."""
WRONG = '{"train_batch_size": 8, "gradient_clipping": 1.0, "zero_optimisation": {"stage": 2}}'
"""DSP001 unknown-key, an error."""


@pytest.fixture
def team(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project that is worked in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def project(folder: Path, text: str) -> None:
    (folder / "pyproject.toml").write_text(text, "utf-8")


def config(folder: Path, name: str, text: str) -> str:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text, "utf-8")
    return name


def told(done: Done) -> list[tuple[str, str, str]]:
    """(file, rule, severity) of each finding of --format json."""
    return [
        (file["file"], finding["rule"], finding["severity"])
        for file in json.loads(done.out)["files"]
        for finding in file["findings"]
    ]


def refused(done: Done, *words: str) -> None:
    assert done.code == 2, done
    assert done.out == ""
    (line,) = done.err.strip().splitlines()
    assert line.startswith("dsplan: error: ") and "a fault of dsplan itself" not in line
    for word in words:
        assert word in line, line


# Suppressions in the file


@pytest.mark.parametrize("entry", ["DSP001", "dsp001", "unknown-key", "DSP00", "DSP"])
def test_a_file_suppresses_by_id_name_or_beginning(entry: str) -> None:
    text = ODD[:-1] + f', "dsplan": {{"ignore": ["{entry}"]}}}}'
    found = lint_text(text)
    assert found.findings == ()
    assert [finding.rule for finding in found.suppressed] == ["DSP001"]


def test_an_unused_suppression_is_told_where_it_stands() -> None:
    text = PLAIN[:-1] + ',\n "dsplan": {"ignore": ["DSP010", "DSP005"]}}'
    found = lint_text(text)
    assert [(finding.rule, finding.pointer, finding.span.line) for finding in found.findings] == [
        ("DSP060", "/dsplan/ignore/0", 2),
        ("DSP060", "/dsplan/ignore/1", 2),
    ]


def test_a_suppression_is_not_judged_by_rules_that_did_not_run() -> None:
    text = PLAIN[:-1] + ', "dsplan": {"ignore": ["DSP102", "DSP1", "DSP901"]}}'
    assert lint_text(text).findings == ()  # no cluster, no model
    assert lint_text(PLAIN[:-1] + ', "dsplan": {"ignore": ["DSP005", "DSP060"]}}').findings == ()


def test_a_suppression_of_no_rule_is_told_with_what_is_near() -> None:
    (found,) = lint_text(PLAIN[:-1] + ', "dsplan": {"ignore": ["unknwon-key"]}}').findings
    assert (found.rule, found.pointer) == ("DSP061", "/dsplan/ignore/0")
    assert 'did you mean "unknown-key"?' in found.message


@pytest.mark.parametrize("block", ['{"ignore": "DSP001"}', '{"ignore": [1]}', '{"ignore": [["DSP001"]]}', "[]", "1"])
def test_a_suppression_of_another_shape_suppresses_nothing_and_is_told(block: str) -> None:
    rules = [finding.rule for finding in lint_text(ODD[:-1] + f', "dsplan": {block}}}').findings]
    assert "DSP001" in rules
    assert len(rules) > 1


def test_what_a_file_ignores_is_not_fixed(team: Path) -> None:
    text = WRONG[:-1] + ', "dsplan": {"ignore": ["DSP001"]}}'
    name = config(team, "ds.json", text)
    assert dsplan("lint", name, "--fix").code == 0
    assert (team / name).read_text("utf-8") == text


# [tool.dsplan]


def test_the_nearest_pyproject_that_speaks_of_dsplan_counts(team: Path) -> None:
    project(team, '[tool.dsplan]\nignore = ["DSP001"]\n')
    inner = team / "inner"
    inner.mkdir()
    project(inner, '[project]\nname = "x"\n')
    deep = config(team, "inner/deep/ds.json", ODD)
    assert told(dsplan("lint", deep, "--format", "json")) == []
    project(inner, "[tool.dsplan]\n")
    assert told(dsplan("lint", deep, "--format", "json")) == [(deep, "DSP001", "warning")]


def test_the_command_line_wins_over_pyproject(team: Path) -> None:
    name = config(team, "ds.json", ODD)
    project(team, '[tool.dsplan]\nignore = ["DSP001"]\nselect = ["DSP001", "DSP2"]\nfail-on = "warning"\n')
    assert told(dsplan("lint", name, "--format", "json")) == []
    assert told(dsplan("lint", name, "--format", "json", "--ignore", "DSP202")) == [(name, "DSP001", "warning")]
    assert dsplan("lint", name, "--ignore", "DSP202").code == 1
    assert dsplan("lint", name, "--ignore", "DSP202", "--fail-on", "error").code == 0
    assert dsplan("lint", name, "--ignore", "DSP202", "--exit-zero").code == 0


def test_cluster_and_reader_of_a_project(team: Path) -> None:
    name = config(team, "ds.json", '{"train_batch_size": 6, "gradient_clipping": 1.0}')
    project(team, '[tool.dsplan]\ncluster = 4\nfor = "trainer"\n')
    report = json.loads(dsplan("lint", name, "--format", "json").out)
    assert report["files"][0]["read_as"] == "trainer"
    assert "DSP102" in [finding["rule"] for finding in report["files"][0]["findings"]]
    over = dsplan("lint", name, "--format", "json", "--cluster", "3", "--for", "deepspeed")
    assert json.loads(over.out)["files"][0]["read_as"] == "deepspeed"
    assert "DSP102" not in [rule for _, rule, _ in told(over)]


def test_the_release_of_a_project(team: Path) -> None:
    """Apex AMP went after 0.19.6: github.com/deepspeedai/DeepSpeed/issues/8489."""
    name = config(team, "ds.json", PLAIN[:-1] + ', "amp": {"enabled": false}}')
    project(team, '[tool.dsplan]\ndeepspeed-version = "0.14.5"\n')
    assert dsplan("lint", name).code == 0
    assert dsplan("lint", name, "--deepspeed-version", "0.19.8").code == 1


def test_per_file_ignores_go_by_glob(team: Path) -> None:
    project(team, '[tool.dsplan.per-file-ignores]\n"old/**/*.json" = ["unknown-key"]\n"legacy_*.json" = ["DSP001"]\n')
    names = [config(team, name, ODD) for name in ("old/a.json", "old/b/c.json", "new/legacy_1.json", "new/a.json")]
    assert told(dsplan("lint", *names, "--format", "json")) == [("new/a.json", "DSP001", "warning")]


@pytest.mark.parametrize(
    ("glob", "path", "matches"),
    [
        ("*.json", "a/b.json", True),
        ("a/*.json", "a/b.json", True),
        ("a/*.json", "a/c/b.json", False),
        ("a/**", "a/c/b.json", True),
        ("a/**/b.json", "a/b.json", True),
        ("./a/b.json", "a/b.json", True),
        ("b?.json", "b1.json", True),
        ("b.json", "a/bb.json", False),
        ("a.c/*", "abc/x", False),
    ],
)
def test_globs(glob: str, path: str, matches: bool) -> None:
    assert glob_matches(glob, path) is matches


def test_an_unused_per_file_ignore_is_told_in_pyproject_where_all_its_files_were_linted(team: Path) -> None:
    project(team, '[tool.dsplan.per-file-ignores]\n"a/*.json" = ["DSP001", "DSP010"]\n"a/x.json" = ["DSP102"]\n')
    one = config(team, "a/x.json", ODD)
    config(team, "a/y.json", PLAIN)
    assert told(dsplan("lint", one, "--format", "json")) == []  # y.json was not looked at
    done = dsplan("lint", ".", "--format", "json")
    assert told(done) == [("pyproject.toml", "DSP060", "warning")]
    (finding,) = json.loads(done.out)["files"][-1]["findings"]
    assert (finding["line"], finding["column"], finding["end_column"]) == (2, 25, 33)
    assert "DSP010" in finding["message"]
    assert told(dsplan("lint", ".", "--format", "json", "--ignore", "DSP060")) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[tool.dsplan]\nignor = []\n", ("pyproject.toml", '"ignor"', "did you mean ignore?")),
        ("[tool.dsplan]\nzzz = 1\n", ('"zzz"', "its keys are select, ignore")),
        ('[tool.dsplan]\nignore = "DSP001"\n', ("ignore", "must be a list")),
        ('[tool.dsplan]\nignore = ["DSP999"]\n', ("pyproject.toml", "'DSP999' is no rule")),
        ('[tool.dsplan]\nselect = ["DSP1"]\nignore = ["DSP1"]\n', ("leave no rule",)),
        ('[tool.dsplan]\nfail-on = "info"\n', ("fail-on", "error, warning")),
        ('[tool.dsplan]\nfor = "megatron"\n', ("for", "trainer")),
        ('[tool.dsplan]\ncluster = "8xH10O"\n', ("pyproject.toml", "cluster", "H10O")),
        ("[tool.dsplan]\ncluster = true\n", ("cluster",)),
        ('[tool.dsplan]\ndeepspeed-version = "banana"\n', ("pyproject.toml", "banana")),
        ('[tool.dsplan]\ncluster = "c.json"\n', ("cluster", "8xH100-80GB")),
        ("[tool.dsplan]\nper-file-ignores = []\n", ("per-file-ignores", "a table")),
        ('[tool.dsplan.per-file-ignores]\n"a" = "b"\n', ("per-file-ignores", '"a"', "must be a list")),
        ("[tool]\ndsplan = 3\n", ("[tool.dsplan] is 3",)),
        ("[tool.dsplan\n", ("pyproject.toml", "is not TOML")),
        ("[tool.dsplan]\npolicy = 1\n", ("policy", "a table of policies")),
        ("[tool.dsplan.policy]\nx = 1\n", ("policy x", "a table")),
        ("[tool.dsplan.policy]\nx = {schema = {}}\n", ("policy x", "lacks pointer")),
        ('[tool.dsplan.policy]\nx = {pointer = "a", schema = {}}\n', ("pointer", "JSON pointer")),
        ('[tool.dsplan.policy]\nx = {pointer = "/a"}\n', ("policy x", "asks for nothing")),
        (
            '[tool.dsplan.policy]\nx = {pointer = "/a", schema = {type = "nr"}}\n',
            ("policy x", "no JSON Schema", "'nr'"),
        ),
        ('[tool.dsplan.policy]\nx = {pointer = "/a", shema = {}}\n', ('"shema"', "did you mean schema?")),
        ('[tool.dsplan.policy]\nx = {pointer = "/a", schema = {}, severity = "bad"}\n', ("severity", "error, warning")),
        ('[tool.dsplan.policy]\nx = {pointer = "/a", schema = {}, required = 1}\n', ("required", "true or false")),
        (
            '[tool.dsplan.policy]\nx = {pointer = "/train_batch_size", schema = {"$ref" = "https://example.org/s"}}\n',
            ("policy x", "cannot be applied"),
        ),
        (
            '[tool.dsplan.policy]\nx = {pointer = "/train_batch_size", schema = {"$ref" = "#"}}\n',
            ("policy x", "cannot be applied"),
        ),
        (
            '[tool.dsplan.policy]\nx = {pointer = "/name", schema = {pattern = "("}}\n',
            ("policy x",),
        ),
    ],
)
def test_a_wrong_pyproject_is_one_line(team: Path, text: str, words: tuple[str, ...]) -> None:
    name = config(team, "ds.json", PLAIN[:-1] + ', "name": "x"}')
    project(team, text)
    refused(dsplan("lint", name), *words)


SCRAPS = st.recursive(
    st.sampled_from([None, True, 0, -1, 1.5, float("nan"), "", "DSP001", "/a", "8xH100-80GB", "error", "$ref", "#"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["pointer", "schema", "message", "required", "a/*.json", "enum", "$ref", "type", "pattern"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from([*_READ, "selct"]), SCRAPS, max_size=3) | SCRAPS)
def test_no_table_makes_it_raise_anything_but_one_line(table: Any) -> None:
    try:
        project = _project(table, "pyproject.toml", "/", "")
        lint_text(ODD, "a/b.json", project=project)
    except Problem as problem:
        assert "\n" not in str(problem)


def test_a_pyproject_that_does_not_speak_of_dsplan_is_not_parsed(team: Path) -> None:
    name = config(team, "ds.json", PLAIN)
    project(team, '[project]\nname = "x"\ndependencies = ["dsplan"]\n[tool.ruff]\nthis is no TOML\n')
    code = "import sys; from dsplan.planner.auditing.linting import lint; lint(['ds.json']); print('tomllib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=team)
    assert done.stdout == "False\n"
    assert dsplan("lint", name).code == 0


@pytest.mark.parametrize(
    "text", ['tool.dsplan.ignore = ["DSP1"]', '[tool]\ndsplan.ignore = ["DSP1"]', "[tool.'dsplan']"]
)
def test_every_way_of_toml_to_write_the_table_is_seen(team: Path, text: str) -> None:
    project(team, text)
    assert read_project("pyproject.toml") is not None


def test_a_pyproject_that_is_no_utf8_is_not_passed_over(team: Path) -> None:
    name = config(team, "ds.json", PLAIN)
    (team / "pyproject.toml").write_bytes(b'[tool.dsplan]\nignore = ["DSP1"]  # \xe9\n')
    done = dsplan("lint", name)
    assert (done.code, done.out) == (2, "")
    assert "pyproject.toml: is not UTF-8 text (byte 35)" in done.err
    (team / "pyproject.toml").write_bytes(b"# \xe9\n")
    assert dsplan("lint", name).code == 0


# Policies


def test_a_policy_is_told_with_its_name_message_and_severity(team: Path) -> None:
    name = config(
        team, "ds.json", '{"train_batch_size": 8,\n "gradient_clipping": 2.5, "zero_optimization": {"stage": 1}}'
    )
    project(
        team,
        "[tool.dsplan.policy]\n"
        'sharded = {pointer = "/zero_optimization/stage", schema = {enum = [2, 3]}, message = "we shard gradients"}\n'
        'calm = {pointer = "/gradient_clipping", schema = {maximum = 1}, severity = "warning"}\n'
        'precise = {pointer = "/bf16/enabled", schema = {const = true}, required = true, severity = "info"}\n'
        'absent = {pointer = "/wandb/enabled", schema = {const = true}}\n',
    )
    done = dsplan("lint", name, "--select", "DSP090", "--format", "json")
    assert done.code == 1
    report = [
        (found["line"], found["severity"], found["message"]) for found in json.loads(done.out)["files"][0]["findings"]
    ]
    assert report == [
        (1, "info", "policy precise: must be set (bf16.enabled is not set)"),
        (2, "warning", "policy calm: 2.5 is greater than the maximum of 1 (gradient_clipping is 2.5)"),
        (2, "error", "policy sharded: we shard gradients (zero_optimization.stage is 1)"),
    ]


def test_without_a_policy_jsonschema_is_not_loaded(team: Path) -> None:
    config(team, "ds.json", PLAIN)
    project(team, '[tool.dsplan]\nignore = ["DSP202"]\n')
    code = "import sys; from dsplan.planner.auditing.linting import lint; lint(['ds.json']); print('jsonschema' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=team)
    assert done.stdout == "False\n"


# Baselines


def test_a_baseline_holds_what_is_there_and_tells_what_is_new(team: Path) -> None:
    name = config(team, "a/ds.json", ODD)
    written = dsplan("lint", "a", "--write-baseline", "base.json")
    assert written.code == 0 and "base.json holds 1 finding" in written.err
    assert json.loads((team / "base.json").read_text("utf-8")) == {
        "version": 1,
        "findings": [{"file": "a/ds.json", "rule": "DSP001", "pointer": "/our_own", "count": 1}],
    }
    config(team, name, "\n\n" + ODD[:-1] + ', "other_thing": 2}')  # moved down, and one more
    done = dsplan("lint", name, "--baseline", "base.json", "--format", "json")
    assert [finding["pointer"] for finding in json.loads(done.out)["files"][0]["findings"]] == ["/other_thing"]
    assert done.err == "dsplan: note: 1 finding in the baseline base.json, not told\n"


def test_a_baseline_decides_the_exit_code_and_tells_what_is_gone(team: Path) -> None:
    name = config(team, "ds.json", WRONG)
    assert dsplan("lint", name).code == 1
    assert dsplan("lint", name, "--write-baseline").code == 0
    assert dsplan("lint", name, "--baseline", "dsplan-baseline.json").code == 0
    config(team, name, PLAIN)
    gone = dsplan("lint", name, "--baseline", "dsplan-baseline.json")
    assert "DSP001 at /zero_optimisation of ds.json is found no more" in gone.err
    other = dsplan("lint", config(team, "other.json", PLAIN), "--baseline", "dsplan-baseline.json")
    assert other.err == ""


def test_a_baseline_is_the_same_from_any_folder(team: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config(team, "a/ds.json", WRONG)
    dsplan("lint", "a/ds.json", "--write-baseline", "base.json")
    monkeypatch.chdir(team / "a")
    assert dsplan("lint", "ds.json", "--baseline", "../base.json").code == 0


def test_writing_a_baseline_anew_keeps_what_it_says_of_other_files(team: Path) -> None:
    one, two = config(team, "a.json", ODD), config(team, "b.json", WRONG)
    dsplan("lint", one, two, "--write-baseline", "base.json")
    config(team, one, PLAIN)
    dsplan("lint", one, "--baseline", "base.json", "--write-baseline")
    assert [entry["file"] for entry in json.loads((team / "base.json").read_text("utf-8"))["findings"]] == ["b.json"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ("cannot be read",)),
        ("", ("is no baseline",)),
        ("{", ("is no baseline",)),
        ("[" * 100_000, ("is no baseline",)),
        ("[]", ("is no baseline",)),
        ('{"version": 2, "findings": []}', ("is no baseline",)),
        ('{"version": 1, "findings": [1]}', ("findings.0 is 1",)),
        ('{"version": 1, "findings": [{"file": "a", "rule": "b"}]}', ("findings.0", "pointer is null")),
        ('{"version": 1, "findings": [{"file": "a", "rule": "b", "pointer": "", "count": 0}]}', ("count is 0",)),
    ],
)
def test_a_wrong_baseline_is_one_line(team: Path, content: str | None, words: tuple[str, ...]) -> None:
    name = config(team, "ds.json", PLAIN)
    if content is not None:
        config(team, "base.json", content)
    refused(dsplan("lint", name, "--baseline", "base.json"), "base.json", *words)


def test_a_baseline_is_never_written_over_something_else(team: Path) -> None:
    name = config(team, "ds.json", PLAIN)
    refused(dsplan("lint", name, f"--write-baseline={name}"), "ds.json", "is no baseline")
    assert (team / name).read_text("utf-8") == PLAIN
    refused(dsplan("lint", name, "--write-baseline=none/base.json"), "none/base.json", "cannot be written")


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["--write-baseline"], ["--write-baseline="]),
        (["--write-baseline", "--fix"], ["--write-baseline=", "--fix"]),
        (["--write-baseline", "ds.json"], ["--write-baseline=", "ds.json"]),
        (["--write-baseline", "new.json", "ds.json"], ["--write-baseline", "new.json", "ds.json"]),
        (["--write-baseline", "old.json", "ds.json"], ["--write-baseline", "old.json", "ds.json"]),
        (["--write-baseline=x", "ds.json"], ["--write-baseline=x", "ds.json"]),
    ],
)
def test_write_baseline_takes_what_follows_unless_it_is_to_be_linted(
    team: Path, words: list[str], meant: list[str]
) -> None:
    config(team, "ds.json", PLAIN)
    config(team, "old.json", '{"version": 1, "findings": []}')
    assert list(with_baseline_file(words)) == meant


def test_statistics_go_with_two_formats(team: Path) -> None:
    name = config(team, "ds.json", ODD)
    assert dsplan("lint", name, "--statistics").out.startswith("1  DSP001  unknown-key\n1 warning in 1 file")
    assert json.loads(dsplan("lint", name, "--statistics", "--format", "json").out)["statistics"] == {"DSP001": 1}
    refused(dsplan("lint", name, "--statistics", "--format", "junit"), "--statistics", "junit")


def test_a_rule_that_per_file_ignores_names_must_exist(team: Path) -> None:
    project(team, '[tool.dsplan]\nper-file-ignores = {"*.json" = ["DSP999"]}\n')
    done = dsplan("lint", config(team, "ds.json", ODD))
    assert (done.code, done.err) == (2, "dsplan: error: pyproject.toml: 'DSP999' is no rule; dsplan rules lists them\n")


@pytest.mark.parametrize(
    ("glob", "path", "matches"),
    [
        ("ds_[ab].json", "ds_a.json", True),
        ("ds_[!a].json", "ds_a.json", False),
        ("ds_[!a].json", "ds_b.json", True),
        ("[d-e]s/*.json", "ds/x.json", True),
        ("ds[", "ds[", True),
        ("[z-a].json", "z.json", False),
        ("[^a].json", "^.json", True),
    ],
)
def test_a_glob_may_list_characters(glob: str, path: str, matches: bool) -> None:
    assert glob_matches(glob, path) is matches


def test_a_baseline_says_nothing_of_rules_that_were_not_asked(team: Path) -> None:
    name = config(team, "ds.json", ODD)
    dsplan("lint", name, "--write-baseline", "base.json")
    held = (team / "base.json").read_text()
    assert dsplan("lint", name, "--baseline", "base.json", "--select", "DSP101").err == ""
    dsplan("lint", name, "--write-baseline", "base.json", "--select", "DSP101")
    assert (team / "base.json").read_text() == held


def test_a_baseline_knows_a_dict_of_a_program_whose_lines_have_moved(team: Path) -> None:
    text = f"ds = {ODD}\nds = {ODD}\n"
    config(team, "t.py", text)
    dsplan("lint", "t.py#ds", "--write-baseline", "base.json")
    config(team, "t.py", "import os\n\n" + text)
    done = dsplan("lint", "t.py#ds", "--baseline", "base.json", "--fail-on", "warning")
    assert (done.code, done.err) == (0, "dsplan: note: 2 findings in the baseline base.json, not told\n")


@pytest.mark.parametrize(
    "options",
    [
        ("--versions", "--baseline", "base.json"),
        ("--versions", "--statistics"),
        ("--versions", "--fail-on", "warning"),
        ("--diff", "--format", "json"),
        ("--diff", "--statistics"),
    ],
)
def test_options_that_would_be_passed_over_are_refused(options: tuple[str, ...], team: Path) -> None:
    done = dsplan("lint", config(team, "ds.json", PLAIN), *options)
    assert done.code == 2 and done.out == "" and done.err.count("\n") == 1


def test_exit_zero_counts_for_versions_too(team: Path) -> None:
    name = config(team, "ds.json", '{"train_batch_size": 0}')
    assert dsplan("lint", name, "--versions").code == 1
    assert dsplan("lint", name, "--versions", "--exit-zero").code == 0


@pytest.mark.parametrize(
    ("pattern", "options"),
    [
        ("DSP801", []),  # the native engine's
        ("DSP090", []),  # of policies, and there are none
        ("DSP107", ["--for", "deepspeed"]),  # of the Trainer and Accelerate
        ("DSP080", ["--for", "deepspeed"]),  # said where nobody names the reader
    ],
)
def test_a_suppression_of_a_rule_that_could_not_speak_is_not_called_unused(
    pattern: str, options: list[str], team: Path
) -> None:
    name = config(team, "ds.json", PLAIN[:-1] + f', "dsplan": {{"ignore": ["{pattern}"]}}}}')
    assert told(dsplan("lint", name, *options, "--format", "json")) == []
    project(team, f'[tool.dsplan]\nper-file-ignores = {{"ds.json" = ["{pattern}"]}}\n')
    assert told(dsplan("lint", ".", *options, "--format", "json")) == []


def test_a_suppression_of_a_rule_that_did_speak_is_called_unused(team: Path) -> None:
    name = config(team, "ds.json", PLAIN[:-1] + ', "dsplan": {"ignore": ["DSP801"]}}')
    assert told(dsplan("lint", name, "--engine", "native", "--format", "json")) == [(name, "DSP060", "warning")]


def test_a_file_that_cannot_be_read_takes_nothing_out_of_its_baseline(team: Path) -> None:
    name = config(team, "ds.json", ODD)
    dsplan("lint", name, "--write-baseline", "base.json")
    config(team, "ds.json", ODD[:-1])
    assert dsplan("lint", name, "--baseline", "base.json").err == ""


def test_a_wrong_dsplan_block_is_a_warning_since_no_reader_minds_it(team: Path) -> None:
    name = config(team, "ds.json", PLAIN[:-1] + ', "dsplan": ["DSP001"]}')
    assert told(dsplan("lint", name, "--format", "json")) == [(name, "DSP008", "warning")]
    name = config(team, "ds.json", PLAIN[:-1] + ', "dsplan": {"ignore": [1]}}')
    assert "dsplan.ignore is a list, but must be a list whose entries are each a text" in dsplan("lint", name).out
