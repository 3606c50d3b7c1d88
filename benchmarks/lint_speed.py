"""How long `dsplan lint` takes beside check-jsonschema, the whole process: `python benchmarks/lint_speed.py`

    --check-jsonschema PATH   the other tool (pip install check-jsonschema into an environment of its own)
    --files FOLDER            what the second part lints; default: 250 copies of the examples, made here

The aims: one file cold in under 150 ms and in at most 0.6 of what check-jsonschema takes with the same schema on the same
file; 250 files in one call in under 2 s. Prints medians of wall and of CPU seconds (which other work on the machine disturbs
less) and their ratios. The bytecode is compiled first, as pip does for a wheel and `make` for an editable install.
"""

from __future__ import annotations

import argparse
import compileall
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "examples" / "ds_config.json"
SCHEMA = ROOT / "schemas" / "ds_config.schema.json"
RUNS = 15


def seconds(command: list[str], runs: int = RUNS) -> tuple[float, float]:
    """Medians of wall and of CPU seconds."""
    walls, cpus = [], []
    for _ in range(runs):
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        walls.append(time.perf_counter() - start)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpus.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.returncode in (0, 1), f"{command} did not run"
    return statistics.median(walls), statistics.median(cpus)


def copies(folder: Path, count: int = 250) -> None:
    """So many configurations: the example, and what the repository lints in its tests."""
    sources = [CONFIG, *sorted((ROOT / "tests" / "cases").glob("*/ds_config.json"))]
    for index in range(count):
        shutil.copyfile(sources[index % len(sources)], folder / f"ds_config_{index}.json")


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--check-jsonschema", default=shutil.which("check-jsonschema"))
    options.add_argument("--files", type=Path)
    chosen = options.parse_args()
    for part in ("planner", "reports", "schemas"):
        compileall.compile_dir(ROOT / part, quiet=2)
    script = Path(sys.executable).with_name("dsplan")
    dsplan = [str(script)] if script.exists() else [sys.executable, "-m", "dsplan.planner.cli"]
    commands = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "import typer": [sys.executable, "-c", "import typer"],
        "dsplan lint FILE": [*dsplan, "lint", str(CONFIG)],
        "dsplan lint FILE --world-size 2": [*dsplan, "lint", str(CONFIG), "--world-size", "2"],
    }
    if chosen.check_jsonschema:
        commands["check-jsonschema FILE"] = [chosen.check_jsonschema, "--schemafile", str(SCHEMA), str(CONFIG)]
    took = {}
    for name, command in commands.items():
        took[name] = seconds(command)
        print(f"{name:32} {took[name][0]:6.3f} s wall  {took[name][1]:6.3f} s CPU")
    if chosen.check_jsonschema:
        ours, theirs = took["dsplan lint FILE"], took["check-jsonschema FILE"]
        print(f"dsplan / check-jsonschema: {ours[0] / theirs[0]:.2f} wall, {ours[1] / theirs[1]:.2f} CPU (aim: 0.60)")
    else:
        print("check-jsonschema is not here; --check-jsonschema PATH names it")
    with tempfile.TemporaryDirectory() as made:
        folder = chosen.files or Path(made)
        if not chosen.files:
            copies(folder)
        count = len(list(folder.glob("*.json")))
        wall, cpu = seconds([*dsplan, "lint", str(folder), "--format", "json"], runs=5)
    print(f"{count} files in one call: {wall:.3f} s wall, {cpu:.3f} s CPU (aim for 250: 2 s)")


if __name__ == "__main__":
    main()
