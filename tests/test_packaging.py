"""What a wheel of this tree holds."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PARTS = ("planner", "runtime", "reports", "schemas")


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Paths inside a wheel that is built from a copy of the tree (so that nothing is left in it)."""
    import shutil

    tree = tmp_path_factory.mktemp("tree")
    for part in PARTS:
        shutil.copytree(ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tree / name)
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(tree)],
        check=True,
        capture_output=True,
    )
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_every_source_file_is_in_the_wheel(wheel_names: set[str]) -> None:
    wanted = {f"dsplan/{path.relative_to(ROOT).as_posix()}" for part in PARTS for path in (ROOT / part).rglob("*.py")}
    assert wanted - wheel_names == set()


def test_data_files_are_in_the_wheel(wheel_names: set[str]) -> None:
    wanted = {f"dsplan/schemas/{path.name}" for path in (ROOT / "schemas").glob("*.json")}
    wanted |= {f"dsplan/{part}/py.typed" for part in PARTS}
    stand_in = [
        path
        for path in (ROOT / "runtime/launching/stand_in").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    wanted |= {f"dsplan/{path.relative_to(ROOT).as_posix()}" for path in stand_in}
    assert wanted - wheel_names == set()


def test_the_wheel_holds_nothing_but_the_package(wheel_names: set[str]) -> None:
    assert {name.split("/")[0].split("-")[0] for name in wheel_names} == {"dsplan"}


def test_every_folder_with_an_init_is_listed() -> None:
    if sys.version_info < (3, 11):
        import tomli as tomllib
    else:
        import tomllib
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["packages"])
    held = {
        "dsplan." + path.parent.relative_to(ROOT).as_posix().replace("/", ".")
        for part in PARTS
        for path in (ROOT / part).rglob("__init__.py")
        if "stand_in" not in path.parts
    }
    assert listed == held
