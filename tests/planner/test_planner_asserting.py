"""--assert: each memory and time field, several rows, what cannot be read. Rows are made by hand."""

import pytest
from dsplan.planner.asserting import failure, parse_assertion
from dsplan.schemas.cluster import Cluster, find_gpu
from dsplan.schemas.estimate import Estimate, Memory, ModelFacts, Row, StepTime
from dsplan.schemas.layout import Layout
from dsplan.schemas.plan import Plan
from dsplan.schemas.problem import Problem
from dsplan.schemas.units import GIB

MEMORY = tuple(Memory.__dataclass_fields__)
TIME = tuple(StepTime.__dataclass_fields__)


def report(*values: float | None, own: int | None = None, gpu: str | None = "A100-80GB") -> Estimate:
    """A row per value, which each of its fields holds."""
    rows = tuple(
        Row(
            plan=Plan(
                engine="native",
                layout=Layout(dp_shard=2),
                zero_stage=stage,
                precision="bf16",
                micro_batch=1,
                accumulation=1,
            ),
            level="formula",
            memory=Memory(**dict.fromkeys(MEMORY, value)),  # type: ignore[arg-type]
            time=StepTime(**dict.fromkeys(TIME, value)),
            verdict="fits",
            runnable=True,
        )
        for stage, value in enumerate(values)
    )
    facts = ModelFacts(
        source="m.py", params=1, trainable_params=1, forward_flops=None, flops_source=None, shapes_sha256=""
    )
    cluster = Cluster(nodes=1, gpus_per_node=2, gpu=find_gpu(gpu) if gpu else None, text="2")
    return Estimate(model=facts, cluster=cluster, engine="native", engine_version="1", rows=rows, own=own)


@pytest.mark.parametrize("name", [*MEMORY, *TIME])
def test_every_field_can_be_asked_for(name: str) -> None:
    limit = "3GiB" if name in MEMORY else str(3 * GIB)
    for sign, true in (("<=", True), (">=", True), ("==", True), ("<", False), (">", False)):
        assert (failure(parse_assertion(f"{name} {sign} {limit}"), [report(3 * GIB)]) is None) == true


def test_what_fails_is_said_with_its_value() -> None:
    assert (
        failure(parse_assertion("device_bytes<=2GiB"), [report(3 * GIB)])
        == "device_bytes is 3 GiB (zero 0, bf16, dp 2)"
    )


def test_the_users_own_row_decides_alone() -> None:
    assertion = parse_assertion("device_bytes <= 2GiB")
    assert failure(assertion, [report(3 * GIB, GIB)]) is None
    assert failure(assertion, [report(3 * GIB, GIB, own=0)]) is not None


def test_by_two_engines_the_users_own_row_must_hold_for_both() -> None:
    assertion = parse_assertion("device_bytes <= 2GiB")
    assert failure(assertion, [report(GIB, own=0), report(3 * GIB, own=0)]) is not None
    assert failure(assertion, [report(GIB, own=0), report(2 * GIB, own=0)]) is None
    assert failure(assertion, [report(3 * GIB), report(GIB)]) is None  # of any row, whose ever


def test_of_several_rows_the_nearest_is_named() -> None:
    said = failure(parse_assertion("device_bytes <= 2GiB"), [report(5 * GIB, 3 * GIB, None)])
    assert said == "it holds in none of 2 rows; the nearest: device_bytes is 3 GiB (zero 1, bf16, dp 2)"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "cannot be read"),
        ("device_bytes", "cannot be read"),
        ("device_bytes != 3", "cannot be read"),
        ("device_bytes <= lots", "'lots' is no size"),
        ("device_byte <= 3", "choose from params_bytes"),
        ("mfu >= 40%", "'40%' is no plain number"),
        ("mfu >= nan", "'nan' is no plain number"),
        ("step_seconds <= 5GiB", "'5GiB' is no plain number"),
        ("device_bytes <= 3 GiB and more", "is no size"),
    ],
)
def test_what_cannot_be_read_is_one_line(text: str, words: str) -> None:
    with pytest.raises(Problem) as problem:
        parse_assertion(text)
    assert words in str(problem.value)
    assert "\n" not in str(problem.value)


def test_a_value_that_nobody_knows_names_what_it_takes() -> None:
    with pytest.raises(Problem, match="a kind of GPU in --cluster"):
        failure(parse_assertion("step_seconds <= 1"), [report(None, gpu=None)])
    with pytest.raises(Problem, match="a sample batch"):
        failure(parse_assertion("step_seconds <= 1"), [report(None)])
