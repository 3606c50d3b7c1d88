"""MODEL told apart, loaded, and refused in one clear line."""

import json
import re

import pytest
from dsplan.planner.load import load_subject, parse_set, told_apart
from dsplan.planner.tracer import trace
from dsplan.schemas.problem import Problem

MODEL = """
import torch
from torch import nn

def build_model(width=4, depth=1, name="net"):
    print("building", name)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))

class Wide(nn.Linear):
    def __init__(self, width=8):
        super().__init__(width, width)

def sample_batch(micro_batch, seq_len=None):
    return (torch.zeros(micro_batch, 4),)

number = 3
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(name, text):
        (tmp_path / name).write_text(text if isinstance(text, str) else json.dumps(text))
        return name

    return write


def refusal(action):
    with pytest.raises(Problem) as caught:
        action()
    text = str(caught.value)
    assert "\n" not in text
    return text, caught.value.user_traceback


LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 40,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def test_told_apart_without_running(write, tmp_path):
    bomb = "raise SystemExit('ran')\n"
    write("config.json", LLAMA)
    assert told_apart(write("model.py", bomb + "def build_model(): ...\n"))[0] == "file"
    assert told_apart(write("named.py", bomb + "build_model = make\n"))[0] == "file"
    assert told_apart(write("train.py", bomb + "from model import build_model\n"))[0] == "script"
    assert told_apart("train.py:NAME")[0] == "file"
    assert told_apart("config.json")[0] == "hf"
    assert told_apart(str(tmp_path))[0] == "hf"


@pytest.mark.parametrize(
    ("text", "value"), [("3", 3), ("2.5", 2.5), ("True", True), ("(1, 2)", (1, 2)), ("gelu", "gelu"), ("'3'", "3")]
)
def test_set_values_are_literals_else_text(text, value):
    assert parse_set(text) == value


def test_build_model_with_keywords(write, capsys):
    subject = load_subject(write("model.py", MODEL), sets={"width": "6", "depth": "2", "name": "big"})
    assert [tuple(param.shape) for param in subject.module.parameters()] == [(6, 6), (6,), (6, 6), (6,)]
    assert all(param.is_meta for param in subject.module.parameters())
    out, err = capsys.readouterr()
    assert (out, err) == ("", "building big\n"), "stdout is the report's"


def test_another_name_of_the_file(write):
    subject = load_subject(write("model.py", MODEL) + ":Wide", sets={"width": "5"})
    assert tuple(subject.module.weight.shape) == (5, 5)
    assert subject.source == "model.py:Wide"


def test_a_model_that_reads_values_while_it_is_built(write):
    rates = "[rate.item() for rate in torch.linspace(0, 0.2, 3)]"
    text = (
        MODEL.replace("range(depth)", rates)
        .replace("nn.Linear(", "nn.Linear(bias=True, *")
        .replace("*width, width", "*(width, width)")
    )
    subject = load_subject(write("model.py", text))
    assert len(subject.module) == 3
    assert all(param.is_meta for param in subject.module.parameters())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def build_model(:\n    pass\n", r"model\.py:1: not valid Python: .*; correct it and try again"),
        (
            "x = 1\nimport missing_thing\ndef build_model(): ...\n",
            r"model\.py:2: .*ModuleNotFoundError: No module named 'missing_thing'",
        ),
        ("def build_model():\n    return 1 / 0\n", r"model\.py:2: build_model\(\) raised ZeroDivisionError"),
        ("def build_model():\n    return [1]\n", r"build_model\(\) returned a list, but must return a torch.nn.Module"),
        ("def build_model():\n    ...\n", r"build_model\(\) returned None, but must return a torch.nn.Module"),
        ("build_model = 3\n", r"build_model is an int, but must be a function or class"),
        (
            "def build_model(width): ...\n",
            r"build_model\(\) raised TypeError: .*missing 1 required positional argument: 'width'",
        ),
    ],
)
def test_a_model_file_that_cannot_be_used(write, text, expected):
    message, _ = refusal(lambda: load_subject(write("model.py", text)))
    assert re.search(expected, message)


def test_the_users_own_traceback_comes_along(write):
    _, text = refusal(lambda: load_subject(write("model.py", "def build_model():\n    return 1 / 0\n")))
    lines = text.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert 'model.py", line 2, in build_model' in lines[1]
    assert lines[-1] == "ZeroDivisionError: division by zero"


def test_a_wrong_keyword_is_named(write):
    message, _ = refusal(lambda: load_subject(write("model.py", MODEL), sets={"widht": "6"}))
    assert "build_model(widht=6) raised TypeError: build_model() got an unexpected keyword argument 'widht'" in message


def test_a_name_that_the_file_lacks(write):
    message, _ = refusal(lambda: load_subject(write("model.py", MODEL) + ":Nothing"))
    assert message == "model.py has no Nothing; name a function or class in it that makes the model"


@pytest.mark.parametrize(
    ("returned", "seen"),
    [
        ("torch.zeros(micro_batch, 4)", "a Tensor"),
        ("None", "None"),
        ("(1, 2)", "a tuple"),
        ("[torch.zeros(1, 4)]", "a list"),
    ],
)
def test_a_sample_batch_of_the_wrong_shape(write, returned, seen):
    subject = load_subject(write("model.py", MODEL.replace("(torch.zeros(micro_batch, 4),)", returned)))
    message, _ = refusal(lambda: trace(subject, precision="bf16"))
    assert f"sample_batch returned {seen}, but must return a tuple" in message and "return (tokens,)" in message


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        (
            "def loss(output, batch):\n    return output",
            r"loss\(output, batch\) returned a tensor of shape \[1, 4\], but must return a scalar",
        ),
        (
            "def loss(output, batch):\n    return output.nothing",
            r"model\.py:\d+: loss\(output, batch\) raised AttributeError",
        ),
        (
            "build_model = lambda: type('M', (nn.Linear,), {'forward': lambda self, x: 'text'})(4, 4)",
            r"output is a str, but must hold a float tensor",
        ),
        (
            "def sample_batch(micro_batch):\n    return (torch.zeros(micro_batch, 5),)",
            r"the model raised RuntimeError",
        ),
        (
            "def sample_batch(micro_batch):\n    return 1 / 0",
            r"model\.py:\d+: sample_batch\(1\) raised ZeroDivisionError",
        ),
    ],
)
def test_a_model_that_does_not_run(write, extra, expected):
    subject = load_subject(write("model.py", MODEL + extra))
    message, _ = refusal(lambda: trace(subject, precision="bf16"))
    assert re.search(expected, message)


def test_without_sample_batch_a_note_says_what_to_add(write):
    subject = load_subject(write("model.py", MODEL.replace("def sample_batch", "def other")))
    assert "add one that returns the model's inputs" in trace(subject, precision="bf16").notes[0]


def test_a_length_that_sample_batch_does_not_take(write):
    subject = load_subject(write("model.py", MODEL.replace(", seq_len=None", "")), seq_len=7)
    message, _ = refusal(lambda: trace(subject, precision="bf16"))
    assert "takes no seq_len" in message


def test_no_such_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "missing.py: no such file" in refusal(lambda: load_subject("missing.py"))[0]
    assert (
        "missing/thing: no such file or folder, and no model of that name"
        in refusal(lambda: load_subject("missing/thing"))[0]
    )
    (tmp_path / "folder").mkdir()
    assert "the folder holds no config.json" in refusal(lambda: load_subject("folder"))[0]


def test_settings_need_a_model_file(write):
    assert (
        "--set width=... goes to build_model()"
        in refusal(lambda: load_subject(write("config.json", LLAMA), sets={"width": "1"}))[0]
    )


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"architectures": ["NoSuchForCausalLM"]}, r"transformers [\d.]+ has no NoSuchForCausalLM; write a model.py"),
        (
            {"architectures": "LlamaForCausalLM"},
            r"architectures is 'LlamaForCausalLM', but must be a list that names a class",
        ),
        ({"architectures": None}, r"names no class; add \"architectures\""),
        ({"model_type": "gpt2"}, r'model_type is "gpt2", but LlamaForCausalLM takes "llama"'),
        ({"hidden_size": "big"}, r"config\.json: "),
    ],
)
def test_a_config_that_names_no_model(write, change, expected):
    message, _ = refusal(lambda: load_subject(write("config.json", {**LLAMA, **change})))
    assert re.search(expected, message) and "config.json" in message


def test_a_config_of_something_else(write):
    assert "holds neither" in refusal(lambda: load_subject(write("ds.json", {"fp16": {"enabled": True}})))[0]
    assert re.search(r"bad\.json:1:\d+: not valid JSON", refusal(lambda: load_subject(write("bad.json", "{]")))[0])


def test_the_length_of_a_config_says_where_it_comes_from(write):
    subject = load_subject(write("config.json", LLAMA))
    assert subject.notes == ("seq_len 40 (max_position_embeddings of the config); --seq-len changes it",)
    assert load_subject("config.json", seq_len=9).notes == ()
    assert trace(load_subject("config.json", seq_len=9), precision="bf16").seq_len == 9
