"""Which ranks a collective waits for in vain: by what each said last."""

import sys
from pathlib import Path

import torch.distributed as dist
from dsplan.runtime.launching import progress
from dsplan.runtime.launching.progress import Position, describe, is_of_collective, lagging
from dsplan.schemas.problem import Problem

HERE = Position(step=12, doing="forward", collectives=40, at="train.py:31", heard=100.0)


def test_a_rank_that_has_begun_fewer_collectives_is_named_with_its_place():
    held = {0: HERE, 1: HERE, 2: Position(step=11, doing="between steps", collectives=37, at="train.py:44", heard=99.0)}
    assert lagging(held, 0, 3) == [2]
    assert describe(held, 0, 3, 60, now=100.0) == (
        "rank 2 did not arrive where rank 0 waits (step 12, forward, train.py:31): "
        "rank 2 is at step 11, between steps, train.py:44"
    )


def test_a_rank_that_has_left_a_silent_one_and_one_that_never_spoke():
    left = Position(step=10, doing="has ended", collectives=33, at="", heard=50.0, ended=True)
    held = {0: HERE, 1: left, 3: Position(step=11, doing="step", collectives=39, at="", heard=40.0)}
    assert describe(held, 0, 4, 60, now=100.0) == (
        "ranks 1, 2, 3 did not arrive where rank 0 waits (step 12, forward, train.py:31): rank 1 has ended after 10 steps; "
        "rank 2 has said nothing since the start; rank 3 is at step 11, step, silent for 60 s"
    )


def test_where_all_have_begun_as_many_the_places_are_told():
    held = {0: HERE, 1: Position(step=12, doing="between steps", collectives=40, at="train.py:50", heard=100.0)}
    assert describe(held, 0, 2, 60, now=100.0) == (
        "rank 0 waited 60 s in vain (step 12, forward, train.py:31), where all ranks have begun as many collectives, but not "
        "the same: rank 1 is at step 12, between steps, train.py:50"
    )


def test_of_a_thousand_ranks_eight_are_named():
    told = describe({0: HERE}, 0, 1000, 60, now=100.0)
    assert told.startswith("ranks 1, 2, 3, 4, 5, 6, 7, 8 and more did not arrive")
    assert told.endswith("; and 991 more")


def test_what_is_the_failure_of_a_collective():
    """Texts as torch 2.13 raises them with gloo."""
    assert is_of_collective(
        RuntimeError("[.../gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:7586: Connection reset")
    )
    assert is_of_collective(dist.DistBackendError("NCCL error"))
    assert not is_of_collective(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_of_collective(KeyError("gloo"))


def test_without_a_launch_a_problem_is_told_by_the_scripts_line_and_other_errors_as_ever(monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: print("as ever", file=sys.stderr))
    progress.chain_excepthook.__wrapped__()
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)
    for error in (Problem("this\n  that", user_traceback="theirs\n"), ValueError("other")):
        try:
            raise error
        except Exception:
            sys.excepthook(*sys.exc_info())
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith("raise error"))
    told = f"theirs\ndsplan: error: {Path(__file__).name}:{line}: this\n  that\nas ever\n"
    assert capsys.readouterr().err == told
