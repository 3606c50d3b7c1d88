"""Sizes in and out."""

import pytest
from dsplan.schemas.units import count, flops, gib, in_unit, parse_bytes, rate, seconds, size, table_unit
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("80GB", 80_000_000_000), ("1.5 GiB", 1_610_612_736), ("4096", 4096), ("2 kib", 2048), ("1TB", 10**12)],
)
def test_sizes_are_read(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1 XB", "1e9", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no size"):
        parse_bytes(text)


@given(st.integers(0, 10**15))
def test_a_plain_number_is_bytes(number: int) -> None:
    assert parse_bytes(str(number)) == number


def test_printing() -> None:
    assert gib(2**30 * 12.571) == "12.57"
    assert gib(None) == "-"
    assert size(2**30) == "1 GiB"
    assert size(511) == "511 B"
    assert count(8_030_261_248) == "8.03 bn"
    assert seconds(0.3124) == "312 ms"
    assert flops(2.92e11) == "292 GFLOP"
    assert (rate(0.5234), rate(11.63), rate(129_234.0)) == ("0.523", "11.6", "129,200")
    assert table_unit(3 * 2**20) == ("MiB", 2**20)
    assert in_unit(3 * 2**20, 2**20) == "3.00"
