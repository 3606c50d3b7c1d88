"""Python values through JSON and back."""

import enum
import json
import math
from collections import Counter

import numpy as np
import pytest
from dsplan.runtime.checkpoints.plain import decode, encode
from dsplan.schemas.problem import Problem
from hypothesis import given
from hypothesis import strategies as st

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(), inner)
        | st.dictionaries(st.integers() | st.sampled_from(["!tuple", "!items"]), inner, max_size=2)
    ),
    max_leaves=12,
)


@given(VALUES)
def test_what_is_encoded_comes_back_as_it_was(value):
    back = decode(json.loads(json.dumps(encode(value, "it"))))
    assert back == value and repr(back) == repr(value)


class Mode(str, enum.Enum):
    BEST = "best"

    def __str__(self):
        return "another word"


class Odd(int):
    def __int__(self):
        return 7


def test_members_of_enumerations_and_subclasses_are_what_json_writes_of_them():
    given_values = [Mode.BEST, Odd(3), np.float64(0.5)]
    assert encode(given_values, "it") == ["best", 3, 0.5] == json.loads(json.dumps(given_values))
    assert [type(value) for value in encode(given_values, "it")] == [str, int, float]


def test_what_holds_itself_is_refused_and_what_is_there_twice_is_not():
    own_dict, own_list, shared, deep = {}, [], [1], 3
    own_dict["me"] = own_dict
    own_list += [own_list, own_list]
    for _ in range(3000):
        deep = (deep,)
    for value in (own_dict, {"best": own_list}, deep):
        with pytest.raises(Problem, match=r"^it is nested more than 64 deep, or holds itself, which JSON cannot hold$"):
            encode(value, "it")
    assert encode([shared, shared], "it") == [[1], [1]]


def test_counters_tensors_and_numbers_that_are_none():
    import torch

    value = {"milestones": Counter({3: 2}), "lr": torch.tensor(0.5, dtype=torch.float64), "loss": math.inf}
    back = decode(json.loads(json.dumps(encode(value, "it", tensors=True))))
    assert back["milestones"] == Counter({3: 2}) and isinstance(back["milestones"], Counter)
    assert torch.equal(back["lr"], value["lr"]) and back["lr"].dtype == torch.float64
    assert back["loss"] == math.inf


def test_what_json_cannot_hold_is_named_with_its_place():
    import numpy
    import torch

    for value, text in (
        ({"a": [1, {2}]}, "it['a'][1] is a set, which JSON cannot hold; give numbers, words, lists and dicts"),
        (
            torch.ones(2, 3),
            "it is a torch.Tensor of shape [2, 3], which JSON cannot hold; give its .tolist(), or save it in a ",
        ),
        (numpy.ones(3), "it is a numpy.ndarray of shape [3], which JSON cannot hold; give its .tolist()"),
        (numpy.int64(3), "it is a numpy.int64, which JSON cannot hold; give its .item()"),
        ({"f": print}, "it['f'] is a builtin_function_or_method, which JSON cannot hold"),
    ):
        with pytest.raises(Problem) as caught:
            encode(value, "it")
        assert str(caught.value).startswith(text)
    assert encode(numpy.float64(0.5), "it") == 0.5
