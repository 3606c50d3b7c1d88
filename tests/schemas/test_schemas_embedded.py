"""Configurations inside YAML and Python files: their values as the file's own reader has them, their places, their gaps."""

import ast
from pathlib import Path

import pytest
import yaml
from dsplan.schemas.embedded import python_documents, yaml_document
from dsplan.schemas.positions import SyntaxProblem
from dsplan.schemas.problem import Problem

YAML = """\
# training
output_dir: x
deepspeed: &ds
  train_batch_size: 8
  fp16: {enabled: yes, initial_scale_power: 0x10}
  zero_optimization:
    stage: 2
    reduce_bucket_size: 5e8
    leaf: [1, 2.5, null, "auto", ~]
    when: 2026-01-01
eval:
  <<: *ds
  train_batch_size: 4
"""


@pytest.mark.parametrize("pointer", ["", "/deepspeed", "/eval", "/deepspeed/zero_optimization"])
def test_yaml_values_are_those_of_pyyaml(pointer: str) -> None:
    wanted = yaml.safe_load(YAML)
    for name in pointer.split("/")[1:]:
        wanted = wanted[name]
    read = yaml_document(YAML, pointer, "f").value

    def plain(value: object) -> object:
        if isinstance(value, dict):
            return {key: plain(entry) for key, entry in value.items()}
        if isinstance(value, list):
            return [plain(entry) for entry in value]
        return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)

    assert read == plain(wanted)


def test_yaml_places_are_those_of_the_text() -> None:
    document = yaml_document(YAML, "/deepspeed", "f")
    for pointer, text in {
        "/train_batch_size": "8",
        "/fp16/enabled": "yes",
        "/zero_optimization/reduce_bucket_size": "5e8",
        "/zero_optimization/leaf/3": '"auto"',
    }.items():
        assert document.raw(pointer) == text
    assert document.span("/fp16/enabled").line == 5
    assert document.span("/fp16/enabled").column == YAML.splitlines()[4].index("yes") + 1


def test_a_key_twice_in_yaml_is_told_and_one_over_a_merge_is_not() -> None:
    document = yaml_document("a: {b: 1, b: 2}\nc: &c {d: 1}\ne: {<<: *c, d: 2}\n", "", "f")
    assert [duplicate.pointer for duplicate in document.duplicates] == ["/a/b"]
    assert document.value["a"] == {"b": 2} and document.value["e"] == {"d": 2}


def test_a_tag_of_another_program_is_open() -> None:
    document = yaml_document("a: !ENV ${X}\n", "", "f")
    assert document.open == {"/a": "!ENV ${X}"}


@pytest.mark.parametrize(
    ("text", "pointer", "said"),
    [
        ("a: 1\n", "/deepspeed", "f: has no /deepspeed; its keys are a"),
        ("a: {b: {c: 1}, d: 2}\n", "/a/e/f", "f: has no /a/e/f; the keys of /a are b, d"),
        ("a: ds.json\n", "/a", 'f: /a is "ds.json", no mapping; if it names a file, lint that file'),
        ("- 1\n", "", "f: the top level is a list, but must be a mapping"),
    ],
)
def test_what_is_no_mapping_is_one_line(text: str, pointer: str, said: str) -> None:
    with pytest.raises(Problem) as problem:
        yaml_document(text, pointer, "f")
    assert str(problem.value) == said


@pytest.mark.parametrize(
    ("text", "line"), [("a: [1\nb: 2\n", 2), ("a: {b: 1\n", 2), ("\tb: 1\n", 1), ("a: *nobody\n", 1)]
)
def test_broken_yaml_has_a_place(text: str, line: int) -> None:
    with pytest.raises(SyntaxProblem) as problem:
        yaml_document(text, "", "f")
    assert problem.value.span.line == line


def test_yaml_that_unfolds_without_end_is_refused() -> None:
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
    with pytest.raises(SyntaxProblem, match="too many members"):
        yaml_document(bomb, "", "f")
    with pytest.raises(SyntaxProblem, match="levels deep"):
        yaml_document("&a [*a]\n", "", "f")


PYTHON = """\
import os
größe = 1
ds_config: dict = {
    "train_batch_size": 2 * 8, "größe": args.size,
    'fp16': {"enabled": True},
    "zero_optimization": dict(stage=3, reduce_bucket_size=int(5e8)),
    "steps": -1, "names": ["a", ("b", None)],
}

class Trainer:
    def __init__(self):
        self.config = {"a": 1}

deepspeed.initialize(config={"b": f"{x}"})
"""


def test_python_values_are_those_that_a_run_would_give() -> None:
    [(name, document)] = python_documents(PYTHON, "ds_config", "f")
    assert name == "ds_config"
    assert document.value == {
        "train_batch_size": 16,
        "größe": None,
        "fp16": {"enabled": True},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": None},
        "steps": -1,
        "names": ["a", ["b", None]],
    }
    assert document.open == {"/größe": "args.size", "/zero_optimization/reduce_bucket_size": "int(5e8)"}


def test_python_places_are_in_characters() -> None:
    [(_, document)] = python_documents(PYTHON, "ds_config", "f")
    line = PYTHON.splitlines()[3]
    assert document.raw("/größe") == "args.size"
    assert document.span("/größe").column == line.index("args.size") + 1
    assert document.key_span("/zero_optimization/stage").column == PYTHON.splitlines()[5].index("stage") + 1


def test_names_given_several_dicts_are_told_apart_by_line() -> None:
    found = python_documents(PYTHON, "config", "f")
    assert [name for name, _ in found] == ["config:12", "config:14"]
    [(name, document)] = python_documents(PYTHON, "config:14", "f")
    assert (name, document.open) == ("config:14", {"/b": 'f"{x}"'})


def test_a_name_without_a_dict_is_one_line() -> None:
    with pytest.raises(Problem) as problem:
        python_documents(PYTHON, "nobody", "f")
    assert str(problem.value) == "f: no dict literal is given to nobody; it gives one to ds_config, config"


@pytest.mark.parametrize("text", ["x = {", "x = " + "{'a':" * 3000, "def f(:\n"])
def test_broken_python_has_a_place(text: str) -> None:
    with pytest.raises(SyntaxProblem):
        python_documents(text, "x", "f")


def test_nothing_of_the_file_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    text = f"open({str(mark)!r}, 'w')\nx = {{'a': open({str(mark)!r}, 'w')}}\n"
    ast.parse(text)
    python_documents(text, "x", "f")
    assert not mark.exists()
