"""What others' CI takes from here: the hooks, the action, and the snippets of the README. Each is parsed, and what it runs is run."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

if sys.version_info < (3, 11):
    import tomli as tomllib
else:
    import tomllib

ROOT = Path(__file__).parent.parent
HOOKS = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text("utf-8"))
ACTION = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
SNIPPETS = [
    yaml.safe_load(block)
    for block in re.findall(r"^```yaml\n(.*?)^```$", (ROOT / "README.md").read_text("utf-8"), re.M | re.S)
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of RUNNER_TEMP's form: dsplan/bin/dsplan is this dsplan."""
    folder = tmp_path_factory.mktemp("runner")
    program = folder / "dsplan" / "bin" / "dsplan"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m dsplan.planner.cli "$@"\n', "utf-8")
    program.chmod(0o755)
    return folder


def bash(script: str, path: Path, cwd: Path = ROOT / "examples", **env: str) -> subprocess.CompletedProcess[str]:
    """As GitHub runs `shell: bash`."""
    given = {**os.environ, "RUNNER_TEMP": str(path), "PATH": f"{path / 'dsplan/bin'}:{os.environ['PATH']}", **env}
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
    return subprocess.run(command, cwd=cwd, env=given, capture_output=True, text=True, timeout=120)


# pre-commit


def test_the_hooks_have_the_fields_of_a_manifest() -> None:
    """pre-commit.com, "Creating new hooks": id, name, entry and language are required."""
    assert [(hook["id"], hook["language"]) for hook in HOOKS] == [
        ("dsplan-lint", "python"),
        ("dsplan-lint-system", "system"),
    ]
    assert all(hook["name"] and hook["entry"] for hook in HOOKS)
    assert "dsplan" in PROJECT["project"]["scripts"]


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook["id"])
def test_a_hooks_entry_runs_on_the_files_that_it_is_given(hook: dict[str, Any], path: Path) -> None:
    good = bash(f"{hook['entry']} --cluster 2 ds_config.json", path)
    assert good.returncode == 0, good.stderr
    assert bash(f"{hook['entry']} ds_config.json faulty/ds_config.json", path).returncode == 1


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("ds_config.json", True),
        ("a/ds.json", True),
        ("ds-z3.json", True),
        ("ds2.json", True),
        ("conf/deepspeed_zero3.json", True),
        ("conf/my-deepspeed.hjson", True),
        ("zero2.json", True),
        ("conf/zero_3_offload.json", True),
        ("llama_ds_config.json", True),
        ("dsconfig.json", True),
        ("zero_stage3.json", True),
        ("kids_config.json", False),
        ("train_ds_split.json", False),
        ("package.json", False),
        ("dsl.json", False),
        ("dataset.json", False),
        ("deepspeed/train.py", False),
        ("zeros.json", False),
    ],
)
def test_which_files_the_hooks_take(name: str, taken: bool) -> None:
    assert {re.search(hook["files"], name) is not None for hook in HOOKS} == {taken}


# The action


def test_the_action_has_the_fields_of_a_composite_one() -> None:
    """docs.github.com, "Metadata syntax for GitHub Actions": each step that runs something names its shell."""
    assert ACTION["name"] and ACTION["description"]
    assert ACTION["runs"]["using"] == "composite"
    assert all(step["shell"] == "bash" and step["run"] for step in ACTION["runs"]["steps"])
    assert all(entry["description"] for entry in ACTION["inputs"].values())
    used = set(re.findall(r"\$\{\{ inputs\.(\w+) \}\}", json.dumps(ACTION)))
    assert used == set(ACTION["inputs"])


def test_no_input_of_the_action_becomes_part_of_a_script() -> None:
    assert [step["run"] for step in ACTION["runs"]["steps"] if "${{" in step["run"]] == []


@pytest.mark.parametrize(("files", "code"), [("ds_config.json", 0), ("faulty/*.json\n  ds_config.json", 1)])
def test_the_action_prints_annotations(files: str, code: int, path: Path) -> None:
    done = bash(ACTION["runs"]["steps"][1]["run"], path, FILES=files, ARGS="--cluster 2", FORMAT="github", OUTPUT="x")
    assert done.returncode == code, done.stderr
    assert all(line.startswith("::") for line in done.stdout.splitlines())
    assert ("::error file=faulty/ds_config.json,line=" in done.stdout) == (code == 1)


def test_the_action_writes_sarif_and_still_fails(path: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.sarif"
    given = {"FILES": "faulty/ds_config.json", "ARGS": "", "FORMAT": "sarif", "OUTPUT": str(output)}
    done = bash(ACTION["runs"]["steps"][1]["run"], path, **given)
    assert (done.returncode, done.stdout) == (1, "")
    assert json.loads(output.read_text("utf-8"))["version"] == "2.1.0"


@pytest.mark.parametrize(("version", "wanted"), [("", "SOURCE"), ("0.1.0", "dsplan==0.1.0")])
def test_the_action_installs_dsplan_and_what_lint_needs(version: str, wanted: str, path: Path, tmp_path: Path) -> None:
    """With a python that only prints what it would do."""
    fake = tmp_path / "dsplan" / "bin" / "python"
    fake.parent.mkdir(parents=True)
    fake.write_text('#!/bin/sh\necho "$@"\n', "utf-8")
    fake.chmod(0o755)
    script = ACTION["runs"]["steps"][0]["run"].replace("python3 -m venv", "true")
    done = bash(script, tmp_path, VERSION=version, SOURCE="SOURCE")
    assert done.stdout.splitlines()[1:] == [
        "-m pip install --quiet --group SOURCE/pyproject.toml:lint",
        f"-m pip install --quiet --no-deps {wanted}",
    ]


# What lint needs


def test_the_group_lint_asks_for_what_the_package_asks_for() -> None:
    assert set(PROJECT["dependency-groups"]["lint"]) <= set(PROJECT["project"]["dependencies"])


def test_lint_loads_no_package_but_those_of_the_group() -> None:
    """With every kind of file, policies and all reports. The rest is what those packages themselves ask for."""
    code = """
import sys
from importlib.metadata import packages_distributions
from dsplan.planner import cli
for words in (["team", "--baseline", "none"], ["faulty/train.yaml#/deepspeed"], ["faulty/template.json"],
              *(["team", "--format", name] for name in ("json", "sarif", "github", "gitlab", "junit", "markdown"))):
    try:
        cli.app(["lint", *words])
    except (SystemExit, Exception):
        pass
tops = {name.partition(".")[0] for name in sys.modules}
print(*{distribution.lower() for top, found in packages_distributions().items() if top in tops for distribution in found})
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "examples", capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.splitlines()[-1].split()) - {"setuptools"}  # its hook for editable installs
    own = {re.split(r"[><=;\[ ]", text)[0].lower() for text in PROJECT["dependency-groups"]["lint"]}
    assert own - {"tomli"} <= loaded
    assert not loaded - own - {"dsplan"} - with_requirements(own), loaded


def with_requirements(names: set[str]) -> set[str]:
    """The distributions that these ask for, and those that they ask for."""
    from importlib.metadata import PackageNotFoundError, requires

    known: set[str] = set()
    waiting = set(names)
    while waiting:
        name = waiting.pop()
        known.add(name)
        try:
            wanted = {re.split(r"[><=!~;\[ (]", text)[0].lower() for text in requires(name) or ()}
        except PackageNotFoundError:
            continue
        waiting |= wanted - known
    return known


# The README


def test_the_snippets_name_what_there_is() -> None:
    pre_commit, *workflows, gitlab = SNIPPETS
    assert {hook["id"] for hook in pre_commit["repos"][0]["hooks"]} <= {hook["id"] for hook in HOOKS}
    for workflow in workflows:
        (step,) = (step for step in workflow["steps"] if "/dsplan@" in step["uses"])
        assert step["with"].keys() <= ACTION["inputs"].keys()
    uploaded = next(step for step in workflows[1]["steps"] if "upload-sarif" in step["uses"])
    assert uploaded["with"]["sarif_file"] == ACTION["inputs"]["output"]["default"]
    assert uploaded["if"] == "always()"
    job = gitlab["dsplan"]
    report = job["artifacts"]["reports"]["codequality"]
    assert job["artifacts"]["when"] == "always"
    assert job["script"][-1].endswith(f"> {report}")
    lint = {text for text in PROJECT["dependency-groups"]["lint"] if "python_version" not in text}
    assert set(shlex.split(job["script"][1])[2:]) == lint


def test_the_gitlab_job_writes_its_report(path: Path, tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    config = (ROOT / "examples" / "faulty" / "ds_config.json").read_text("utf-8")
    (tmp_path / "configs" / "ds_config.json").write_text(config, "utf-8")
    job = SNIPPETS[-1]["dsplan"]
    done = bash(job["script"][-1], path, cwd=tmp_path)
    assert done.returncode == 1
    report = json.loads((tmp_path / job["artifacts"]["reports"]["codequality"]).read_text("utf-8"))
    assert {entry["location"]["path"] for entry in report} == {"configs/ds_config.json"}
