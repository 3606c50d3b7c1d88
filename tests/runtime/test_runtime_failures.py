"""Which rank is at fault, from exit codes and what the ranks left."""

import json
import signal

import pytest
from dsplan.runtime.launching.agent import Outcome
from dsplan.runtime.launching.failures import read_failure


def leave(folder, rank, time, **word):
    record = {"time": time, "text": "", "refused": False, "cause": "", "explanation": "", **word}
    (folder / f"failure_{rank}.json").write_text(json.dumps(record))


def test_the_first_that_failed_by_time_and_not_those_that_complain_of_it(tmp_path):
    leave(tmp_path, 0, 20.0, text="Traceback ...\nRuntimeError: Connection closed by peer")
    leave(tmp_path, 1, 10.0, text="Traceback ...\nKeyError: 'lost'")
    failure = read_failure(tmp_path, Outcome({0: 1, 1: 1}))
    assert (failure.exit_code, failure.line) == (1, "rank 1 ended with exit code 1")
    assert failure.detail.endswith("KeyError: 'lost'")
    assert failure.may_pass


def test_a_killed_rank_leaves_no_word_and_goes_first(tmp_path):
    leave(tmp_path, 0, 20.0, text="RuntimeError: Connection closed by peer")
    failure = read_failure(tmp_path, Outcome({0: 1, 1: -signal.SIGKILL}))
    assert failure.exit_code == 137
    assert failure.line == "rank 1 was killed by SIGKILL (out of memory on the host, perhaps)"


def test_a_rank_that_nccls_watchdog_ended_left_its_word_before(tmp_path):
    leave(tmp_path, 0, 20.0, explanation="rank 1 did not arrive where rank 0 waits (step 3, forward): ...")
    failure = read_failure(tmp_path, Outcome({0: -signal.SIGABRT}))
    assert failure.exit_code == 134
    assert failure.line == (
        "rank 0 was killed by SIGABRT: rank 1 did not arrive where rank 0 waits (step 3, forward): ..."
    )


@pytest.mark.parametrize(
    ("outcome", "word", "line"),
    [
        (Outcome({0: 2}), {"text": "ds_config.json: what is wrong", "refused": True}, "ds_config.json: what is wrong"),
        (Outcome({}, signal.SIGINT), {}, "stopped by SIGINT"),
    ],
)
def test_what_would_fail_again_and_what_was_stopped_is_not_started_again(tmp_path, outcome, word, line):
    leave(tmp_path, 0, 1.0, **word)
    failure = read_failure(tmp_path, outcome)
    assert failure.line == line
    assert not failure.may_pass
