"""How long `dsplan lint FILE` takes, the whole process: `python benchmarks/lint_startup.py`. The aim is under 0.25 s.

Prints the best of ten runs, in wall and in CPU seconds (which other work on the machine disturbs less), beside a bare Python.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from pathlib import Path

CONFIG = Path(__file__).parents[1] / "examples" / "ds_config.json"
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "import typer": [sys.executable, "-c", "import typer"],
    "import dsplan.planner.linting": [sys.executable, "-c", "import dsplan.planner.linting"],
    "dsplan lint FILE": [sys.executable, "-m", "dsplan.planner.cli", "lint", str(CONFIG)],
}


def best(command: list[str], runs: int = 10) -> tuple[float, float]:
    """Least wall and least CPU seconds of the runs."""
    walls, cpus = [], []
    for _ in range(runs):
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        walls.append(time.perf_counter() - start)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpus.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(walls), min(cpus)


if __name__ == "__main__":
    for name, command in COMMANDS.items():
        wall, cpu = best(command)
        print(f"{name:32} {wall:6.3f} s wall  {cpu:6.3f} s CPU")
