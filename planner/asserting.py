"""`--assert 'device_bytes <= 72GiB'`: one comparison on a row of the report, for CI."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from dsplan.reports.answers_text import row_name
from dsplan.schemas.estimate import Estimate, Memory, Row, StepTime
from dsplan.schemas.problem import Problem
from dsplan.schemas.units import parse_bytes, size

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
    "==": operator.eq,
}
_FORM = re.compile(r"\s*(\w+)\s*(<=|>=|==|<|>)\s*(.+?)\s*")
_MEMORY = tuple(field.name for field in fields(Memory))
_TIME = tuple(field.name for field in fields(StepTime))


@dataclass(frozen=True, slots=True, kw_only=True)
class Assertion:
    """name is a field of the row's memory or time."""

    name: str
    operator: str
    value: float


def parse_assertion(text: str) -> Assertion:
    """Assertion of "device_bytes <= 72GiB" or "mfu >= 0.4"; Problem where it cannot be read."""
    match = _FORM.fullmatch(text)
    if not match:
        raise Problem(f"--assert {text!r} cannot be read; write for example 'device_bytes <= 72GiB'")
    name, sign, value = match.groups()
    if name not in _MEMORY + _TIME:
        raise Problem(f"--assert: {name} is no field of a row; choose from {', '.join(_MEMORY + _TIME)}")
    try:
        number = float(parse_bytes(value)) if name in _MEMORY else float(value)
        if not math.isfinite(number):
            raise ValueError(value)
    except ValueError as error:
        what = "size, such as 72GiB" if name in _MEMORY else "plain number, such as 0.4; seconds and rates have no unit"
        raise Problem(f"--assert: {value!r} is no {what}") from error
    return Assertion(name=name, operator=sign, value=number)


def failure(assertion: Assertion, reports: Sequence[Estimate]) -> str | None:
    """Why it does not hold, with the numbers; None where it does. Of the user's own row by each engine; without one, of any row.

    Problem where no row has a value of that name.
    """
    first = reports[0]
    own = [report.rows[report.own] for report in reports if report.own is not None]
    rows = own or [row for report in reports for row in report.rows]
    known = [(row, value) for row in rows if (value := _value(assertion, row)) is not None]
    if not known:
        what = "a kind of GPU in --cluster" if first.cluster.gpu is None else "a sample batch of the model"
        raise Problem(f"--assert: {assertion.name} is not known here; it takes {what}")
    wrong = [(row, value) for row, value in known if not _OPERATORS[assertion.operator](value, assertion.value)]
    if not wrong or (not own and len(wrong) < len(known)):
        return None
    row, value = min(wrong, key=lambda pair: abs(pair[1] - assertion.value))
    nearest = f"{assertion.name} is {_text(assertion, value)} ({row_name(row.plan)})"
    return nearest if len(wrong) == 1 else f"it holds in none of {len(wrong)} rows; the nearest: {nearest}"


def _text(assertion: Assertion, value: float) -> str:
    return size(value) if assertion.name in _MEMORY else f"{value:.4g}"


def _value(assertion: Assertion, row: Row) -> float | None:
    value: float | None = getattr(row.memory if assertion.name in _MEMORY else row.time, assertion.name)
    return value
