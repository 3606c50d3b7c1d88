"""Names that were meant: the fast way finds what the plain definition says."""

from __future__ import annotations

import pytest
from dsplan.planner.rules.near_names import edits, nearest
from hypothesis import given
from hypothesis import strategies as st

KEYS = ("zero_optimization", "train_batch_size", "gradient_clipping", "fp16", "bf16", "steps_per_print")
WORDS = st.text("abc", max_size=9)


def plain_edits(left: str, right: str) -> int:
    """Optimal string alignment by its definition: the whole table, nothing left out."""
    rows = [[max(i, j) if not min(i, j) else 0 for j in range(len(right) + 1)] for i in range(len(left) + 1)]
    for i in range(1, len(left) + 1):
        for j in range(1, len(right) + 1):
            changed = rows[i - 1][j - 1] + (left[i - 1] != right[j - 1])
            rows[i][j] = min(rows[i - 1][j] + 1, rows[i][j - 1] + 1, changed)
            if i > 1 and j > 1 and left[i - 1] == right[j - 2] and left[i - 2] == right[j - 1]:
                rows[i][j] = min(rows[i][j], rows[i - 2][j - 2] + 1)
    return rows[-1][-1]


@given(WORDS, WORDS, st.integers(1, 3))
def test_edits_are_those_of_the_whole_table_up_to_the_limit(left: str, right: str, limit: int) -> None:
    assert edits(left, right, limit) == min(plain_edits(left, right), limit + 1)


@given(st.sampled_from(KEYS), st.data())
def test_a_key_with_one_edit_is_found_again(key: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(key) - 1))
    letter = data.draw(st.sampled_from("abcxyz"))
    wrong = data.draw(st.sampled_from([key[:at] + key[at + 1 :], key[:at] + letter + key[at:]]))
    found = nearest(wrong, KEYS)
    assert found is not None
    assert plain_edits(wrong.replace("_", ""), found.replace("_", "")) <= 1


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("zero_optimisation", "zero_optimization"),
        ("ZeroOptimization", "zero_optimization"),
        ("train-batch-size ", "train_batch_size"),
        ("fp61", "fp16"),
        ("batch_size", "train_batch_size"),
        ("learning_rate", None),
        ("x" * 100, None),
    ],
)
def test_what_is_meant(name: str, meant: str | None) -> None:
    assert nearest(name, KEYS) == meant
