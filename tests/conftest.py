"""Options and fixtures that all tests share."""

import os

import pytest
from hypothesis import settings

# The same examples in every run: a law that breaks does so for everybody, not once a month. Search with --hypothesis-profile=default.
settings.register_profile("steady", derandomize=True, deadline=None)
settings.load_profile("steady")

# Each rank and each tool call gets one thread: two cores are shared by several processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Widths and colours of what is compared as text do not depend on the terminal.
os.environ["COLUMNS"] = "120"
os.environ["NO_COLOR"] = "1"
os.environ.pop("FORCE_COLOR", None)
# No test asks a hub for anything.
os.environ["HF_HUB_OFFLINE"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write what is printed now into golden files and docs"
    )


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden"))
