"""What earlier releases made of each key. Facts are from DeepSpeed's own source and release notes, by hand."""

from __future__ import annotations

import subprocess
import sys

import pytest
from dsplan.schemas.known_keys import at_release, lookup
from dsplan.schemas.problem import Problem
from dsplan.schemas.releases import asked, default_at, nearest, order, status_at

WANTED = {"0.9.5", "0.12.6", "0.14.5", "0.15.4", "0.16.9", "0.17.6", "0.18.9", "0.19.8"}


def test_the_releases_that_people_run_were_asked() -> None:
    assert set(asked()) >= WANTED
    assert list(asked()) == sorted(asked(), key=order)


@pytest.mark.parametrize(
    ("version", "meant"),
    [
        ("0.14.5", "0.14.5"),
        ("v0.14.5", "0.14.5"),
        ("0.14.6", "0.14.5"),
        ("0.14.x", "0.14.5"),
        ("0.14", "0.14.5"),
        ("0.19.8+cu128", "0.19.8"),
        ("0.17.7.dev3", "0.17.6"),
        ("0.14.5rc1", "0.14.5"),
        ("1.0.0", "0.19.8"),
    ],
)
def test_a_version_counts_as_the_nearest_below_that_was_asked(version: str, meant: str) -> None:
    assert nearest(version) == meant


@pytest.mark.parametrize("version", ["latest", "", "0", "0.14.5.6", "0.9.4", "0.3.16", "zero.14.5", "0.14.5 oh"])
def test_what_is_no_release_is_one_line(version: str) -> None:
    with pytest.raises(Problem) as refused:
        nearest(version)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("pointer", "release", "status"),
    [
        ("/amp", "0.14.5", "read"),
        ("/amp", "0.19.8", "refused"),
        ("/zero_optimization/zenflow", "0.14.5", "refused"),
        ("/zero_optimization/zenflow", "0.17.6", "read"),
        ("/gradient_allreduce_op", "0.14.5", "ignored"),
        ("/gradient_allreduce_op", "0.19.8", "read"),
        ("/aio/thread_count", "0.14.5", "read"),
        ("/aio/thread_count", "0.19.8", "ignored"),
        ("/train_batch_size", "0.14.5", None),
    ],
)
def test_the_status_of_a_key(pointer: str, release: str, status: str | None) -> None:
    assert status_at(pointer, release) == status


@pytest.mark.parametrize(
    ("pointer", "before", "after"),
    [
        ("/gradient_clipping", 0.0, 1.0),  # deepspeedai/DeepSpeed#8068
        ("/bf16/check_grad_overflow", False, True),  # #8035; the key came in 0.17, as false
        ("/zero_optimization/offload_optimizer/pin_memory", False, True),  # #8207
        ("/zero_optimization/offload_param/pin_memory", False, True),
    ],
)
def test_defaults_that_changed(pointer: str, before: object, after: object) -> None:
    assert (default_at(pointer, "0.14.5"), default_at(pointer, "0.19.8")) == (before, after)


def test_the_schema_of_a_release_is_that_inside_alone() -> None:
    with at_release("0.14.5"):
        clipping, zenflow, amp = (
            lookup(at) or {} for at in ("/gradient_clipping", "/zero_optimization/zenflow", "/amp")
        )
        assert clipping["default"] == 0.0
        assert zenflow["x-later"] == "0.17.6"
        assert "x-removed" not in amp and amp["x-gone"] == "0.19.8"
        assert (lookup("/fp16") or {})["x-unknown"] == "ignored"
    assert (lookup("/gradient_clipping") or {})["default"] == 1.0
    assert "x-removed" in (lookup("/amp") or {})


def test_one_bit_optimizers_are_names_until_they_were_removed() -> None:
    with at_release("0.14.5"):
        assert "OneBitAdam" in (lookup("/optimizer/type") or {})["x-names"]["deepspeed"]
    assert "OneBitAdam" not in (lookup("/optimizer/type") or {})["x-names"]["deepspeed"]


def test_a_plain_lint_reads_nothing_of_it() -> None:
    program = (
        "import sys; from dsplan.planner.auditing.linting import lint_text; lint_text('{\"train_batch_size\": 8}');"
        "assert 'dsplan.schemas.releases' not in sys.modules and 'importlib.metadata' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
