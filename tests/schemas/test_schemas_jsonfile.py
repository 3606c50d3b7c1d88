"""The JSON reader against its oracles: json and the hjson package; and what it adds, positions."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import hjson
import pytest
from dsplan.schemas.finding import Span
from dsplan.schemas.jsonfile import SyntaxProblem, load_config_file, read_document
from dsplan.schemas.problem import Problem
from hypothesis import given, settings
from hypothesis import strategies as st

WORDS = [
    "{",
    "}",
    "[",
    "]",
    ":",
    ",",
    '"',
    "'",
    "'''",
    "\n",
    "\r",
    " ",
    "\t",
    "#",
    "//",
    "/*",
    "*/",
    "\\",
    "\\n",
    "\\u0041",
]
WORDS += [
    "\\ud83d\\ude00",
    "a",
    "key",
    "true",
    "false",
    "null",
    "True",
    "NaN",
    "1",
    "-",
    "0",
    ".5",
    "1e5",
    "5e8",
    "1.5",
    "e",
    "+",
]
WORDS += ['"a"', "'b'", "{}", "[]", "a: 1\n", '"k": ', "1e400", "00", "\ufeff", "\u0663", "\x00", "\x1f", "\u00e9"]
TEXTS = st.lists(st.sampled_from(WORDS), max_size=14).map("".join)
TEXTS |= TEXTS.map(lambda inner: "{" + inner + "}")

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def oracle(load: Any, text: str) -> tuple[bool, Any]:
    """Whether the reference accepts the text, and as what. It may fail with anything, and a failure is a refusal."""
    try:
        return True, load(text)
    except (ValueError, IndexError, OverflowError):
        return False, None


def ours(text: str, dialect: Any) -> tuple[bool, Any]:
    try:
        return True, read_document(text, dialect).value
    except SyntaxProblem as problem:
        assert 1 <= problem.span.line <= text.count("\n") + text.count("\r") + 1
        assert problem.span.column >= 1
        return False, None


def alike(left: Any, right: Any) -> bool:
    """Equal, with equal types all the way down, and NaN equal to itself."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(alike(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(alike, left, right))
    return bool(left == right) or (isinstance(left, float) and math.isnan(left) and math.isnan(right))


@settings(max_examples=500, deadline=None)
@given(TEXTS)
def test_hjson_is_read_and_refused_as_the_hjson_package_does(text: str) -> None:
    wanted = oracle(lambda text: hjson.loads(text, object_pairs_hook=dict), text)
    assert alike(list(wanted), list(ours(text, "hjson")))


@settings(max_examples=300, deadline=None)
@given(TEXTS)
def test_json_is_read_and_refused_as_pythons_json_does(text: str) -> None:
    assert alike(list(oracle(json.loads, text)), list(ours(text, "json")))


@settings(max_examples=100, deadline=None)
@given(VALUES, st.sampled_from([None, 2]), st.booleans())
def test_what_json_writes_is_read_back(value: Any, indent: int | None, ascii_only: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert alike(read_document(text, "json").value, value)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(), VALUES, max_size=4))
def test_each_value_stands_where_its_span_says(value: dict[str, Any]) -> None:
    document = read_document(json.dumps(value, indent=2), "json")
    for pointer, member in document.walk():
        assert alike(json.loads(document.raw(pointer)), member)


HAND_MADE = [
    "",
    "# only a comment",
    "a: 1",
    "a: 1\nb: two words\nc: [1, 2\n3]",
    "{a: 'x', \"b\": '''y''',\n}",
    "{\n  a: '''\n    one\n    two\n    '''\n}",
    "\ufeff{a: 1}",
    '{"a": False,\n "b": 1}',
    '{"a": 1 // x\n "b": 2 /* y */, c: 5e8}',
    "{a: 1_000}",
    "[1, 2,]",
    "{,}",
    "{a b: 1}",
    '{"a": 1}}',
    "{a: /* never closed",
    "plain text",
    "3",
    "null",
]


@pytest.mark.parametrize("text", HAND_MADE)
def test_hand_made_hjson(text: str) -> None:
    wanted = oracle(lambda text: hjson.loads(text, object_pairs_hook=dict), text)
    assert alike(list(wanted), list(ours(text, "hjson")))


def test_positions_are_in_characters_and_survive_crlf_and_bom() -> None:
    document = read_document('\ufeff{"\u00e9": 1,\r\n\t"b": {"c": [10, 20]}}', "hjson")
    assert document.key_span("/\u00e9") == Span(line=1, column=2, end_line=1, end_column=5)
    assert document.span("/\u00e9") == Span(line=1, column=7, end_line=1, end_column=8)
    assert document.key_span("/b") == Span(line=2, column=2, end_line=2, end_column=5)
    assert document.span("/b/c/1") == Span(line=2, column=18, end_line=2, end_column=20)


def test_pointers_escape_slash_and_tilde() -> None:
    document = read_document('{"a/b": {"~": 1}}', "json")
    assert document.at("/a~1b/~0") == 1
    assert document.raw("/a~1b/~0") == "1"
    assert document.at("/a/b") is None


def test_a_duplicate_names_both_places_and_the_last_counts() -> None:
    document = read_document('{"a": 1,\n "a": 2}', "hjson")
    (duplicate,) = document.duplicates
    assert (duplicate.pointer, duplicate.first.line, duplicate.again.line) == ("/a", 1, 2)
    assert document.value == {"a": 2}


@pytest.mark.parametrize("text", ["[" * 10_000, '{"a":' * 10_000, "{a: [" * 10_000])
@pytest.mark.parametrize("dialect", ["json", "hjson"])
def test_deep_nesting_is_a_problem_not_a_crash(text: str, dialect: Any) -> None:
    with pytest.raises(SyntaxProblem):
        read_document(text, dialect)


def test_a_word_without_quotes_is_blamed_for_the_brace_that_it_takes() -> None:
    with pytest.raises(SyntaxProblem, match="write true") as caught:
        read_document('{"train_batch_size": 8, "bf16": {"enabled": True}}', "hjson")
    assert (caught.value.span.line, caught.value.span.column) == (1, 45)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"a": 1, "a": 2}', '1:10: key "a" stands here a second time'),
        (b"[1]", "the top level is a list, but must be an object"),
        (b'{"a": 1', "1:"),
        (b"\xff\xfe{", "UTF-16"),
        (b'{"a": "\xe9"}', "not UTF-8 text"),
        (b"PK\x00\x01", "not text"),
    ],
)
def test_load_config_file_says_what_is_wrong_in_one_line(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "ds.json"
    file.write_bytes(content)
    with pytest.raises(Problem, match=said) as caught:
        load_config_file(file)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(file))


def test_load_config_file_reads_what_deepspeed_reads(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text("{\n  // note\n  train_batch_size: 8,\n  fp16: {enabled: true,},\n}", "utf-8")
    assert load_config_file(file) == {"train_batch_size": 8, "fp16": {"enabled": True}}
    with pytest.raises(Problem, match="cannot be read"):
        load_config_file(tmp_path / "none.json")
