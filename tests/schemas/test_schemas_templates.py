"""Placeholders: where they are, what they are called, and that a text keeps its places round them."""

import json

import pytest
from dsplan.schemas.templates import MARK, filled, hole_name, is_template, masked


def shown(text: str) -> str:
    return masked(text)[0].replace(MARK, "~")


@pytest.mark.parametrize(
    ("text", "without"),
    [
        ('{"a": ${X}, "b": 1}', '{"a": "~~", "b": 1}'),
        ('{"a": {{ x }}, "b": 1}', '{"a": "~~~~~", "b": 1}'),
        ('{"a": BATCH_SIZE}', '{"a": "~~~~~~~~"}'),
        ('{"a": BS\n}', '{"a": ""\n}'),
        ('{"a": ${A}e8}', '{"a": "~~~~"}'),
        ('{"a": {{x}}{{y}}}', '{"a": "~~~~~~~~"}'),
        ("{ {{ key }}: 1}", '{ "~~~~~~~": 1}'),
        # members that come whole take a comma with them
        ('{"a": 1, {{ more }}}', '{"a": 1            }'),
        ('{ {{ more }}, "a": 1}', '{             "a": 1}'),
        # a comma that an expression writes
        ('[{{ b }} {{ "," if x }}]', '["~~~~~"               ]'),
        ('{"a": $BATCH}', '{"a": "~~~~"}'),
        # what is quoted, commented or means a value is left
        ('{"a": "${X}"}', '{"a": "${X}"}'),
        ('{"a": 1 # ${X}\n}', '{"a": 1 # ${X}\n}'),
        ('{"a": TRUE, "b": NaN, "c": None}', '{"a": TRUE, "b": NaN, "c": None}'),
        ('{"a": {"b": {"c": 1}}}', '{"a": {"b": {"c": 1}}}'),
    ],
)
def test_placeholders_become_quoted_words_of_their_length(text: str, without: str) -> None:
    assert shown(text) == without
    assert len(shown(text)) == len(text)


def test_a_placeholder_over_two_lines_keeps_the_lines() -> None:
    assert shown('{"a": {{\n x }}, "b": 1}') == '{"a": ""\n     , "b": 1}'


def test_a_masked_template_is_json() -> None:
    text = '{"a": [${X}, {{ y }}], {{ more }}, "c": {"d": WORLD_SIZE}}'
    assert json.loads(masked(text)[0]).keys() == {"a", "c"}
    assert list(masked(text)[1].values()) == ["${X}", "{{ y }}", "WORLD_SIZE"]


@pytest.mark.parametrize(
    ("hole", "name"),
    [
        ("${X}", "X"),
        ("${X:-8}", "X"),
        ("${oc.env:X}", "X"),
        ("{{ x }}", "x"),
        ("{{ x | int }}", "x"),
        ("{{ train.batch }}", "train.batch"),
        ("BATCH", "BATCH"),
        ("$BATCH", "BATCH"),
        ("{{- x -}}", "x"),
        ("{{ 1.0 if clip else 0.0 }}", "1.0 if clip else 0.0"),
        ("{{ cfg['bucket'] }}", "cfg['bucket']"),
    ],
)
def test_what_define_calls_a_placeholder(hole: str, name: str) -> None:
    assert hole_name(hole) == name


@pytest.mark.parametrize(
    ("written", "value"),
    [("${X}", 8), ("${X}0", 80), ("/data/${X}/y", "/data/8/y"), ("X", 8), ("{{ Y }}", "cpu"), ("${Z}", True)],
)
def test_what_fills_it_is_read_as_json_where_it_is_json(written: str, value: object) -> None:
    assert filled(written, {"X": "8", "Y": "cpu", "Z": "true"}) == value


@pytest.mark.parametrize("text", ['{"a": {"b": {}}}', '{"a": "AUTO"}', '{"a": -1, "b": [1, 2]}'])
def test_plain_json_is_no_template(text: str) -> None:
    assert not is_template(text)
