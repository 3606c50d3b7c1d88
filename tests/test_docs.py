"""The pages are true: every command in them is run, and what they show is what is printed.

In a block fenced as ```console, a line "$ dsplan …" is a command and the lines up to the next one are its stdout. A line
"…" stands for any lines, "…" within a line for any words. `# exit 1` after a command is its exit code (0 where absent).
Commands other than dsplan are checked against the Makefile.
"""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.forked_commands import Commands

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Example:
    page: Path
    command: str
    exit_code: int
    shown: str


def examples() -> list[Example]:
    found = []
    for page in PAGES:
        for block in BLOCK.findall(page.read_text("utf-8")):
            for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
                line, _, shown = part.partition("\n")
                command, _, note = line.partition("  # exit ")
                found.append(Example(page, command.strip(), int(note or 0), shown.strip("\n")))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds examples/, where commands follow each other as on the page."""
    folder = tmp_path_factory.mktemp("docs")
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="module")
def commands() -> Iterator[Commands]:
    with Commands() as commands:
        yield commands


def run(command: str, folder: Path, commands: Commands, scratch: Path) -> subprocess.CompletedProcess[str]:
    """What imports torch runs in a fork that has it; all else by a shell."""
    program, *arguments = shlex.split(command)
    if arguments[0] in ("estimate", "tune") and not set("|&;<>$*") & set(re.sub(r'"[^"]*"', "", command)):
        return commands.run(arguments, folder, scratch)
    program = command.replace("dsplan ", f"{sys.executable} -m dsplan.planner.cli ", 1)
    return subprocess.run(program, shell=True, cwd=folder, capture_output=True, text=True, timeout=300)


def matches(shown: str, printed: str) -> bool:
    pieces = [re.escape(piece).replace("…", "[^\n]*") for piece in re.split(r"^…$\n?", shown, flags=re.M)]
    return re.fullmatch(r"(?:.*\n)*?".join(pieces) + r"\s*", printed) is not None


DSPLAN = [example for example in examples() if example.command.startswith("dsplan ")]


@pytest.mark.parametrize("example", DSPLAN, ids=lambda example: f"{example.page.name}: {example.command}")
def test_a_command_prints_what_the_page_shows(
    example: Example, folder: Path, commands: Commands, tmp_path: Path, update_golden: bool
) -> None:
    done = run(example.command, folder, commands, tmp_path)
    assert done.returncode == example.exit_code, done.stderr
    printed = "\n".join(line.rstrip() for line in done.stdout.splitlines())
    if update_golden and example.shown and "…" not in example.shown:
        text = example.page.read_text("utf-8")
        example.page.write_text(text.replace(example.shown, printed.strip("\n")), "utf-8")
    elif example.shown:
        assert matches(example.shown, printed.strip("\n") + "\n"), printed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_on_a_page_runs(page: Path, folder: Path) -> None:
    for block in re.findall(r"^```python\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S):
        done = subprocess.run([sys.executable, "-c", block], cwd=folder, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr


def test_every_make_target_of_the_pages_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
    form = re.compile(r"^ +make ([a-z]+)\b|`make ([a-z]+)`", re.M)
    named = {a or b for page in PAGES for a, b in form.findall(page.read_text("utf-8"))}
    assert {"demo", "test"} <= named <= targets


def test_ci_runs_the_readmes_test_command() -> None:
    assert "make test" in (ROOT / ".ci/run").read_text("utf-8")
    assert "make test" in (ROOT / "README.md").read_text("utf-8")


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
