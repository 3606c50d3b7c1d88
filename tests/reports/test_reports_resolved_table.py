"""What resolve and diff print."""

import json

from dsplan.reports import resolved_table
from dsplan.schemas.resolved import Comparison, Difference, Held, Resolved

STAGE = Held(pointer="/zero_optimization/stage", value=2, origin="coerced", note='written as "2"')
PRINTS = Held(
    pointer="/steps_per_print", value=float("inf"), origin="reader", note="Accelerate switches the prints off"
)
SIDE = Resolved(file="ds.json", read_as="trainer", ranks=8, values=(STAGE, PRINTS))


def test_resolved_as_text() -> None:
    assert resolved_table.resolved(SIDE) == (
        "ds.json, as DeepSpeed 0.19.8 holds it under the HF Trainer, dp 8\n"
        "key                      value     from\n"
        'zero_optimization.stage  2         coerced: written as "2"\n'
        "steps_per_print          infinity  reader: Accelerate switches the prints off"
    )


def test_resolved_as_json_is_strict() -> None:
    told = json.loads(resolved_table.resolved_json(SIDE), parse_constant=lambda name: 1 / 0)
    assert told["version"] == 1
    assert told["values"][0] == {
        "pointer": "/zero_optimization/stage",
        "value": 2,
        "origin": "coerced",
        "note": 'written as "2"',
    }
    assert told["values"][1]["value"] == "infinity"


def test_a_comparison_ends_in_its_verdict() -> None:
    other = Held(pointer="/gradient_clipping", value=1.0, origin="default")
    found = Comparison(
        a=SIDE,
        b=SIDE,
        differences=(
            Difference(pointer="/gradient_clipping", a=None, b=other, decides=True),
            Difference(pointer="/zero_optimization/stage", a=STAGE, b=None, decides=False),
        ),
        same_model=False,
        because=("gradient_clipping is 1.0 in B only", "so is another"),
    )
    lines = resolved_table.comparison(found).splitlines()
    assert lines[3].split() == ["key", "A", "B"]
    assert lines[4] == "* gradient_clipping        not there                     1.0  (default)"
    assert lines[5] == '  zero_optimization.stage  2  (coerced: written as "2")  not there'
    assert lines[-1] == "trains the same model: no, because gradient_clipping is 1.0 in B only; so is another"
    told = json.loads(resolved_table.comparison_json(found))
    assert (told["version"], told["same_model"], told["because"]) == (1, False, list(found.because))
    assert told["differences"][0]["a"] is None
    assert told["differences"][0]["b"]["value"] == 1.0


def test_long_and_odd_values_stay_on_one_line() -> None:
    assert len(resolved_table.shown(["x" * 100])) == 44
    assert "\n" not in resolved_table.shown("a\nb")
