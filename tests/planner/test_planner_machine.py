"""The GPU that a driver's name and memory stand for. Names as nvidia-smi and torch print them."""

import pytest
from dsplan.planner.machine import gpu_of
from dsplan.schemas.units import GIB


@pytest.mark.parametrize(
    ("name", "gib", "known"),
    [
        ("NVIDIA H100 80GB HBM3", 79.1, "H100-80GB"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "A100-80GB"),
        ("Tesla V100-SXM2-32GB", 31.7, "V100-32GB"),
        ("NVIDIA H200", 139.8, "H200-141GB"),
        ("NVIDIA GeForce RTX 4090", 23.5, "RTX4090-24GB"),
        ("Tesla T4", 14.6, "T4-16GB"),
        ("NVIDIA L40S", 44.4, "L40S-48GB"),
        ("Imaginary X9000", 33.0, None),
    ],
)
def test_a_drivers_name_is_recognised(name: str, gib: float, known: str | None) -> None:
    found = gpu_of(name, round(gib * GIB))
    assert (found.name if found else None) == known
