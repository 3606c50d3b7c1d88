"""Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (arXiv:1910.02054)."""

import pytest
from dsplan.planner.memory import state_bytes
from dsplan.schemas.choices import OptimizerSpec
from dsplan.schemas.layout import Layout
from dsplan.schemas.plan import Plan

GB = 1e9


def total_gb(params: float, dp: int, zero_stage: int) -> float:
    plan = Plan(
        engine="deepspeed",
        layout=Layout(dp_shard=dp),
        zero_stage=zero_stage,
        precision="fp16",
        micro_batch=1,
        accumulation=1,
        optimizer=OptimizerSpec(name="adam"),
    )
    return sum(state_bytes(round(params), plan).values()) / GB


@pytest.mark.parametrize(("zero_stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_figure_1(zero_stage, gigabytes):
    """7.5 B parameters, 64 ranks, mixed-precision Adam (K = 12)."""
    assert total_gb(7.5e9, 64, zero_stage) == pytest.approx(gigabytes, abs=0.06)


@pytest.mark.parametrize(
    ("dp", "stage_1", "stage_2", "stage_3"),
    [(1, 120, 120, 120), (4, 52.5, 41.3, 30), (16, 35.6, 21.6, 7.5), (64, 31.4, 16.6, 1.88), (256, 30.4, 15.4, 0.47)],
)
def test_table_1_of_7_5_billion(dp, stage_1, stage_2, stage_3):
    for zero_stage, gigabytes in ((1, stage_1), (2, stage_2), (3, stage_3)):
        assert total_gb(7.5e9, dp, zero_stage) == pytest.approx(gigabytes, rel=0.01)
