"""Whatever the input, lint answers with findings or with a Problem in one line. The long run is benchmarks/fuzz_lint.py."""

import json
from pathlib import Path
from typing import Any

import pytest
from dsplan.planner.auditing.fixing import fix_text
from dsplan.planner.auditing.linting import lint, lint_text
from dsplan.planner.rules import RULES
from dsplan.schemas.cluster import parse_cluster
from dsplan.schemas.jsonfile import decode
from dsplan.schemas.problem import Problem
from helpers.strategies import mutants
from hypothesis import given, settings
from hypothesis import strategies as st

SEEDS = [text for rule in RULES.values() for text in (*rule.section("Bad"), *rule.section("Good"))]
ODD = [
    "\r\n",
    "\r",
    "\ufeff",
    "\u2028",
    "\\u",
    "'''",
    "/*",
    "//",
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    '"',
    "{{",
    "{% if x %}",
    "${X}",
]
EDITS = st.lists(
    st.tuples(st.integers(0, 2000), st.integers(0, 20), st.sampled_from(ODD) | st.text(max_size=3)), max_size=6
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("auto"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)


def answered(text: str, reader: str = "auto") -> None:
    found = lint_text(text, reader=reader, cluster=parse_cluster("8"))
    lines = text.count("\n") + text.count("\r") + 1
    for finding in found.findings:
        assert 1 <= finding.span.line <= lines
        assert finding.span.column >= 1
        assert "\n" not in finding.message
    fix_text(found, unsafe=True)


@settings(max_examples=300, derandomize=True, database=None, deadline=None)
@given(st.sampled_from(SEEDS), EDITS, st.sampled_from(["auto", "deepspeed", "trainer", "accelerate"]))
def test_any_edit_of_a_text_is_answered(text: str, edits: list[tuple[int, int, str]], reader: str) -> None:
    for at, cut, odd in edits:
        at %= len(text) + 1
        text = text[:at] + odd + text[at + cut :]
    answered(text, reader)


@settings(max_examples=150, derandomize=True, database=None, deadline=None)
@given(mutants(), JSON)
def test_any_value_anywhere_is_answered(mutant: Any, value: Any) -> None:
    config = mutant.config
    block = config.get("zero_optimization")
    for into in (config, block if isinstance(block, dict) else {}):
        for key in list(into)[:2]:
            into[key] = value
    answered(json.dumps(config))


@settings(max_examples=150, derandomize=True, database=None, deadline=None)
@given(st.binary(max_size=60), st.binary(max_size=60))
def test_any_bytes_are_text_or_a_problem_of_one_line(before: bytes, after: bytes) -> None:
    try:
        text = decode(before + b'{"train_batch_size": 8}' + after, "ds_config.json")
    except Problem as problem:
        assert str(problem).startswith("ds_config.json: is ")
        assert "\n" not in str(problem)
    else:
        answered(text)


FINDINGS = {
    "empty": ("", "DSP009", 1),
    "no object": ("[1, 2]", "DSP009", 1),
    "10,000 levels": ('{"train_batch_size": 8,\n"a": ' + "[" * 10_000, "DSP000", 2),
    "10,000 levels, closed": ('{"a":' * 10_000 + "1" + "}" * 10_000, "DSP000", 1),
    "a byte-order mark": ('\ufeff{"train_batch_size": 8}', "DSP015", 1),
    "a wrong value in CRLF": ('{"train_batch_size": 8,\r\n"steps_per_print": "10"}\r\n', "DSP003", 2),
    "NaN": ('{"train_batch_size": 8,\n"gradient_clipping": NaN}', "DSP", 2),
    "a key twice": ('{"train_batch_size": 8,\n"train_batch_size": 8}', "DSP006", 2),
    "a Jinja block that breaks the structure": ('{"train_batch_size": 8,\n{% if x %}}\n"fp16": {', "DSP000", 1),
    "too many values": ('{"train_batch_size": 8,\n"x": [' + "1," * 30_000 + "1]}", "DSP000", 2),
}
PROBLEMS = {
    "binary": (bytes(range(256)), "is not UTF-8 text"),
    "Latin-1": ('{"wandb": {"team": "é"}}'.encode("latin-1"), "is not UTF-8 text"),
    "UTF-16": ('{"train_batch_size": 8}'.encode("utf-16"), "is UTF-16 text"),
    "NUL": (b'{"train_batch_size": 8\0}', "is not text"),
}


@pytest.mark.parametrize("name", FINDINGS)
def test_bad_input_is_a_finding_with_a_position(name: str) -> None:
    text, rule, line = FINDINGS[name]
    found = [finding for finding in lint_text(text).findings if finding.rule.startswith(rule)]
    assert found, name
    assert min(finding.span.line for finding in found if finding.severity in ("error", "warning")) >= line


@pytest.mark.parametrize("name", PROBLEMS)
def test_what_is_no_text_is_a_problem_of_one_line(name: str, tmp_path: Path) -> None:
    content, said = PROBLEMS[name]
    file = tmp_path / "ds_config.json"
    file.write_bytes(content)
    with pytest.raises(Problem) as caught:
        lint([str(file)])
    assert str(caught.value).startswith(f"{file}: {said}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("end", ["yaml#/deepspeed", "py#ds_config"])
def test_a_long_yaml_or_python_file_is_not_read(end: str, tmp_path: Path) -> None:
    path = tmp_path / f"train.{end}"
    Path(str(path).partition("#")[0]).write_text("x: 1\n" * 200_000, "utf-8")
    with pytest.raises(Problem, match="has 1000000 characters, more than the"):
        lint([str(path)])


def test_a_control_character_in_yaml_has_a_position(tmp_path: Path) -> None:
    file = tmp_path / "train.yaml"
    file.write_text('deepspeed:\n  wandb: {team: "a\x1fb"}\n', "utf-8")
    (found,) = lint([f"{file}#/deepspeed"])
    assert [(finding.rule, finding.span.line, finding.span.column) for finding in found.findings] == [("DSP000", 2, 19)]


def test_a_million_lines_have_their_positions() -> None:
    text = '{"train_batch_size": 8,' + "\n" * 1_000_000 + '"steps_per_print": "10"}'
    found = [finding for finding in lint_text(text, reader="deepspeed").findings if finding.rule == "DSP003"]
    assert [(finding.span.line, finding.span.column) for finding in found] == [(1_000_001, 20)]
