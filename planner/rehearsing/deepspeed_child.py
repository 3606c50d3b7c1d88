"""The process in which DeepSpeed is rehearsed: requests in on stdin, answers out on stdout, both pickled, until stdin ends."""

from __future__ import annotations

import os
import pickle
import sys
from typing import Any

from dsplan.planner.rehearsing.deepspeed import STANDS, Request
from dsplan.planner.rehearsing.rehearsal import Rehearsal
from dsplan.runtime.launching.bootstrap import die_with_parent
from dsplan.schemas.problem import Problem


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    source, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints, prints elsewhere
    subjects: dict[str, Any] = {}
    while True:
        try:
            request = pickle.load(source)
        except EOFError:
            return
        pickle.dump(_answer(request, subjects), answers)
        answers.flush()


def _answer(request: Request, subjects: dict[str, Any]) -> Rehearsal | str:
    from dsplan.planner.models.load import load_subject
    from dsplan.planner.rehearsing.deepspeed_run import run

    try:
        key = repr(request.load)
        if key not in subjects:
            subjects[key] = load_subject(**request.load)
        return run(subjects[key], request.plan, request.config)
    except Problem as problem:
        return str(problem)
    except (Exception, SystemExit) as error:
        return f"DeepSpeed could not be rehearsed: {type(error).__name__}: {' '.join(str(error).split())[:300]}{STANDS}"


if __name__ == "__main__":
    main()
