"""The batch equation. Expected values: DeepSpeed 0.19.8's own arithmetic."""

import pytest
from dsplan.schemas.batch import Batch, resolve_batch
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("given_batch", "dp", "solved"),
    [
        ((32, None, None), 4, Batch(32, 8, 1)),
        ((32, 2, None), 4, Batch(32, 2, 4)),
        ((32, None, 2), 4, Batch(32, 4, 2)),
        ((None, 2, None), 4, Batch(8, 2, 1)),
        ((None, 2, 4), 4, Batch(32, 2, 4)),
        ((32, 2, 4), 4, Batch(32, 2, 4)),
    ],
)
def test_the_batch_equation_is_solved_as_deepspeed_does(
    given_batch: tuple[int | None, int | None, int | None], dp: int, solved: Batch
) -> None:
    assert resolve_batch(*given_batch, dp) == solved


@pytest.mark.parametrize(
    ("given_batch", "dp"),
    [((64, 4, 8), 1), ((2, None, None), 4), ((30, 4, None), 2), ((None, None, 4), 1), ((32, 0, None), 1)],
)
def test_a_batch_without_a_whole_answer_is_refused(
    given_batch: tuple[int | None, int | None, int | None], dp: int
) -> None:
    with pytest.raises(ValueError):
        resolve_batch(*given_batch, dp)


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64))
def test_any_two_of_the_three_give_back_the_third(micro_batch: int, accumulation: int, dp: int) -> None:
    whole = Batch(micro_batch * accumulation * dp, micro_batch, accumulation)
    assert resolve_batch(whole.global_batch, micro_batch, None, dp) == whole
    assert resolve_batch(whole.global_batch, None, accumulation, dp) == whole
    assert resolve_batch(None, micro_batch, accumulation, dp) == whole
