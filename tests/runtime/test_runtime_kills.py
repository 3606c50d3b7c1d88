"""SIGKILL, twice: a rank while it saves, then the launcher. The long run is benchmarks/kill_runs.py."""

from killing import kill_runs, losses
from ranks import run_ranks

STEPS = 12


def test_a_run_whose_rank_and_launcher_are_killed_ends_as_an_undisturbed_one(tmp_path, capsys):
    kill_runs.disturbed_runs(2, seed=62, reference=run_ranks(2, losses, STEPS), folder=tmp_path)
    told = capsys.readouterr().out
    assert "rank" in told and "while saving" in told and "the launcher at any moment" in told
