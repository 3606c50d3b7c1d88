"""benchmarks/kill_runs.py for the suite: its training, undisturbed, on the pooled ranks."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import kill_runs


def losses(steps: int) -> list[str]:
    return kill_runs.train(Path(), steps, save=False)
