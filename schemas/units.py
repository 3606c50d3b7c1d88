"""Sizes and rates: the only file that knows 2**30. Inside, plain SI: bytes, seconds, flops."""

from __future__ import annotations

import re

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12

PRECISIONS = ("fp32", "fp16", "bf16")
PRECISION_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
"""Bytes of one element in the compute dtype of each precision."""

_SUFFIX = {
    "": 1,
    "B": 1,
    "KB": KB,
    "MB": MB,
    "GB": GB,
    "TB": TB,
    "KIB": KIB,
    "MIB": MIB,
    "GIB": GIB,
    "TIB": TIB,
}
_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str) -> int:
    """Bytes of "80GB" (1e9), "1.5 GiB" (2**30) or "4096". ValueError where it is none of these."""
    match = _NUMBER.fullmatch(text)
    if not match or match[2].upper() not in _SUFFIX:
        raise ValueError(f"{text!r} is no size; write for example 80GB (10**9) or 74.5GiB (2**30)")
    return round(float(match[1]) * _SUFFIX[match[2].upper()])


def gib(num_bytes: int | float | None) -> str:
    """Bytes as GiB for a table: "12.57", "0.003"; "-" where there is no number."""
    if num_bytes is None:
        return "-"
    value = num_bytes / GIB
    return f"{value:.2f}" if value >= 0.995 or value == 0 else f"{value:.3g}"


def table_unit(largest_bytes: int | float) -> tuple[str, int]:
    """The one binary unit in which a table of bytes reads well, given its largest cell: ("GiB", 2**30)."""
    for name, unit in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if largest_bytes >= unit:
            return name, unit
    return "B", 1


def in_unit(num_bytes: int | float | None, unit: int) -> str:
    """A cell of that table: "12.57", "0.003", "7"; "-" where there is no number."""
    if num_bytes is None:
        return "-"
    value = num_bytes / unit
    if value == 0 or unit == 1:
        return f"{value:.0f}"
    return f"{value:.2f}" if value >= 0.995 else f"{value:.2g}"


def size(num_bytes: int | float) -> str:
    """Bytes with the binary unit that suits: "12.57 GiB", "38.1 MiB", "512 B"."""
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:.4g} {name}"
    return f"{int(num_bytes)} B"


def count(number: int | float) -> str:
    """A count as people say it: "8.03 bn", "124 M", "11"."""
    for unit, name in ((10**12, "T"), (10**9, "bn"), (10**6, "M"), (10**3, "k")):
        if abs(number) >= unit:
            return f"{number / unit:.3g} {name}"
    return str(int(number))


def rate(per_second: float) -> str:
    """A rate as people read it: "0.52", "11.6", "1,442", "129,200": three or four digits, no exponent."""
    return f"{per_second:.3g}" if per_second < 100 else f"{float(f'{per_second:.4g}'):,.0f}"


def flops(number: float) -> str:
    """Floating-point operations with the SI prefix that suits: "292 GFLOP", "62.9 TFLOP"."""
    for unit, name in ((10**15, "P"), (10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= unit:
            return f"{number / unit:.3g} {name}FLOP"
    return f"{number:.0f} FLOP"


def seconds(value: float | None) -> str:
    """Seconds with the unit that suits: "1.24 s", "312 ms", "45 us"; "-" where there is none."""
    if value is None:
        return "-"
    if value >= 1:
        return f"{value:.3g} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} us"
