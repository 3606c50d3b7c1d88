"""Damaged checkpoints are refused by the name of the file. The long run is benchmarks/damage_checkpoints.py."""

import sys
from pathlib import Path

from ranks import run_ranks

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


def test_damaged_checkpoints_are_refused_by_name_and_the_one_before_is_offered(tmp_path):
    run_ranks(2, save, str(tmp_path / "source"))
    ((refused, wrong),) = run_ranks(1, damage, str(tmp_path), 60)
    assert wrong == []
    assert sum(refused.values()) == 60
    assert len(refused) == 7  # every kind


def save(folder):
    sys.path.insert(0, BENCHMARKS)
    from damage_checkpoints import save_steps

    save_steps(folder)


def damage(folder, count):
    sys.path.insert(0, BENCHMARKS)
    from damage_checkpoints import try_all

    refused, wrong = try_all(Path(folder) / "source", Path(folder), count, seed=1)
    return dict(refused), wrong
