"""The house rules that a glance at the folders promises: who imports whom, and what lint never loads."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ALLOWED = {
    "schemas": {"schemas"},
    "reports": {"reports", "schemas"},
    "runtime": {"runtime", "reports", "schemas"},
    "planner": {"planner", "runtime", "reports", "schemas"},
}
SOURCES = [path for part in ALLOWED for path in sorted((ROOT / part).rglob("*.py")) if "stand_in" not in path.parts]


def imported_modules(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write dsplan.…"
            found.add(node.module)
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    part = path.relative_to(ROOT).parts[0]
    for module in imported_modules(path):
        if module.startswith("dsplan."):
            assert module.split(".")[1] in ALLOWED[part], f"{part} must not import {module}"


@pytest.mark.parametrize(
    "path", [p for p in SOURCES if p.relative_to(ROOT).parts[0] == "schemas"], ids=lambda p: p.name
)
def test_schemas_know_no_torch_and_no_typer(path: Path) -> None:
    tops = {module.split(".")[0] for module in imported_modules(path)}
    assert tops <= set(sys.stdlib_module_names) | {"dsplan", "jsonschema", "yaml"}


def test_no_module_bears_the_name_of_a_public_function() -> None:
    """A function that a package exports, and a submodule of that package, would be one attribute."""
    for part in ("planner", "runtime"):
        assert not {path.stem for path in (ROOT / part).glob("*.py")} & {
            "estimate",
            "lint",
            "tune",
            "launch",
            "initialize",
        }


def loaded_by(code: str) -> set[str]:
    program = f"import sys\n{code}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


def test_lint_never_loads_torch() -> None:
    code = """
from dsplan.planner import cli
try:
    cli.app(["lint", "examples/ds_config.json", "--cluster", "2", "--format", "json"])
except SystemExit:
    pass
"""
    loaded = loaded_by(code)
    assert "dsplan.planner.auditing.linting" in loaded
    assert not {"torch", "numpy", "fvcore", "transformers", "rich"} & loaded


def test_all_schemas_together_load_no_torch() -> None:
    names = [path.stem for path in sorted((ROOT / "schemas").glob("*.py")) if path.stem != "__init__"]
    loaded = loaded_by("\n".join(f"import dsplan.schemas.{name}" for name in names))
    assert not {"torch", "typer", "numpy"} & loaded
