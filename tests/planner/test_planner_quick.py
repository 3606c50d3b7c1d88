"""The short way of `dsplan lint FILE`, which does without typer, says what the long way says."""

import subprocess
import sys
from pathlib import Path

import pytest
from dsplan.planner import cli
from dsplan.planner.quick import quick_lint

CASES = Path(__file__).parents[1] / "cases"
FAULTY, CLEAN, UNREADABLE = (str(CASES / name / "ds_config.json") for name in ("faulty", "trainer_zero3", "unreadable"))


@pytest.mark.parametrize(
    "words",
    [
        [FAULTY],
        [CLEAN],
        [UNREADABLE, FAULTY],
        [FAULTY, "--format", "json"],
        ["--format=github", FAULTY],
        [CLEAN, "--for", "accelerate", "--format", "text"],
        ["--for=trainer", FAULTY],
        [str(CASES)],
    ],
    ids=" ".join,
)
def test_both_ways_say_the_same(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code = quick_lint(["lint", *words])
    said = capsys.readouterr()
    assert code == cli.app(["lint", *words], standalone_mode=False)
    assert said == capsys.readouterr()
    assert said.out


@pytest.mark.parametrize(
    "line",
    [
        [],
        ["rules"],
        ["lint", "--help"],
        ["lint", FAULTY, "--cluster", "8"],
        ["lint", FAULTY, "--for", "nobody"],
        ["lint", FAULTY, "--format"],
        ["lint", FAULTY, "--format", "sarif"],
        ["lint", FAULTY, "--fix"],
        ["lint", "--", FAULTY],
    ],
    ids=" ".join,
)
def test_any_other_line_is_left_to_typer(line: list[str]) -> None:
    assert quick_lint(line) is None


def test_the_short_way_loads_little() -> None:
    program = f"""
import sys
sys.argv = ["dsplan", "lint", {FAULTY!r}]
from dsplan.planner.cli import main
try:
    main()
except SystemExit as end:
    assert end.code == 1, end.code
print(*sys.modules, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    heavy = {"typer", "click", "rich", "traceback", "jsonschema", "yaml", "tomllib", "subprocess", "asyncio"}
    assert {"dsplan.planner.auditing.linting"} <= set(done.stderr.split())
    assert not heavy & set(done.stderr.split())
