"""Placement and the volumes that follow from it, against the ZeRO paper."""

import pytest
from dsplan.schemas.layout import VOLUME, ZERO, Layout, Move, transfers
from hypothesis import given
from hypothesis import strategies as st


def volume(zero_stage: int, accumulation: int) -> int:
    return sum(VOLUME[transfer.move] for transfer in transfers(zero_stage, accumulation))


@pytest.mark.parametrize(("zero_stage", "parameters"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_volume_per_step_is_the_papers(zero_stage: int, parameters: int) -> None:
    """arXiv:1910.02054, section 7: 2 psi without ZeRO and for stages 1, 2; 3 psi for stage 3."""
    assert volume(zero_stage, accumulation=1) == parameters


def test_stage_2_pays_per_micro_batch_and_stage_1_does_not() -> None:
    assert volume(1, accumulation=4) == 2
    assert volume(2, accumulation=4) == 4 + 1  # four reduce-scatters, one all-gather of the updated parameters
    assert volume(0, accumulation=4) == 2


def test_stage_3_gathers_twice_and_reduces_once_per_micro_batch() -> None:
    moves = [transfer.move for transfer in transfers(3, accumulation=2)]
    assert moves.count(Move.ALL_GATHER) == 4
    assert moves.count(Move.REDUCE_SCATTER) == 2


def test_each_stage_shards_one_more_state() -> None:
    sharded = [sum(placement.value == "shard" for placement in (s.param, s.grad, s.optim)) for s in ZERO.values()]
    assert sharded == [0, 1, 2, 3]


@given(st.lists(st.integers(1, 16), min_size=5, max_size=5))
def test_ranks_is_the_product_of_the_degrees(degrees: list[int]) -> None:
    layout = Layout(**dict(zip(("dp_replicate", "dp_shard", "tp", "pp", "sp"), degrees, strict=True)))
    product = 1
    for degree in degrees:
        product *= degree
    assert layout.ranks == product
    assert layout.dp == degrees[0] * degrees[1]


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "2"])
def test_a_degree_is_a_whole_number_of_at_least_one(wrong: object) -> None:
    with pytest.raises(ValueError, match="tp is .* but must be a whole number of at least 1"):
        Layout(tp=wrong)  # type: ignore[arg-type]
