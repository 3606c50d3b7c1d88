"""The loss scale's moves, against sequences worked out by hand from DeepSpeed's rules."""

import pytest
from dsplan.runtime.optimizing.loss_scale import LossScale
from dsplan.schemas.config import Fp16
from dsplan.schemas.problem import Problem


def moves(overflows, **rules):
    """The scale after each step; x is an overflow, . a good step."""
    scaler = LossScale.start(Fp16(**rules))
    seen = []
    for mark in overflows:
        scaler.update(mark == "x")
        seen.append(scaler.value)
    return seen


def test_it_doubles_at_the_step_that_follows_a_window_of_good_steps():
    assert moves("......", initial_scale_power=3, loss_scale_window=2) == [8, 8, 16, 16, 32, 32]


def test_the_first_overflow_uses_up_hysteresis_and_the_second_halves():
    assert moves("x.x.", initial_scale_power=4, loss_scale_window=100) == [16, 16, 8, 8]


def test_hysteresis_is_full_again_after_a_window():
    """x leaves 1 of 2; the third good step doubles the scale and refills it; the next x only uses one up."""
    assert moves("x...x", initial_scale_power=4, loss_scale_window=2) == [16, 16, 16, 32, 32]


def test_consecutive_hysteresis_is_full_again_after_one_good_step():
    assert moves("x.x.x", initial_scale_power=4, loss_scale_window=100, consecutive_hysteresis=True) == [16] * 5
    assert moves("xx", initial_scale_power=4, loss_scale_window=100, consecutive_hysteresis=True) == [16, 8]


def test_the_window_is_counted_from_the_last_overflow():
    assert moves("..x...", initial_scale_power=2, loss_scale_window=2, hysteresis=1) == [4, 4, 2, 2, 2, 4]


def test_it_stops_at_the_minimum_and_says_what_to_do():
    scaler = LossScale.start(Fp16(initial_scale_power=2, hysteresis=1, min_loss_scale=1))
    scaler.update(True)
    scaler.update(True)
    assert scaler.value == 1
    with pytest.raises(Problem, match="smallest loss scale"):
        scaler.update(True)


def test_gradients_are_divided_by_the_scale_they_were_made_with_or_as_deepspeed_does_by_the_grown_one():
    rules = Fp16(initial_scale_power=3, loss_scale_window=1, hysteresis=1)
    exact, halving = LossScale.start(rules), LossScale.start(rules, halves_at_growth=True)
    assert [exact.update(overflow) for overflow in (False, False, True, False)] == [8, 8, 16, 8]
    assert [halving.update(overflow) for overflow in (False, False, False)] == [8, 16, 32]


def test_a_static_scale_never_moves():
    assert moves("x.x", loss_scale=128) == [128, 128, 128]
