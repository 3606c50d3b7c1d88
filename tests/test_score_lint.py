"""The scorer of lint on a small corpus and two cases made here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCORER = Path(__file__).parent.parent / "benchmarks" / "score_lint.py"
RIGHT = {"train_batch_size": 8, "gradient_clipping": 1.0}


def scored(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCORER), *options], capture_output=True, text=True, check=False)


def table(path: Path, *rows: dict[str, str]) -> None:
    names = list(rows[0])
    lines = ["\t".join(names), *("\t".join(row[name] for name in names) for row in rows)]
    path.write_text("\n".join(lines) + "\n", "utf-8")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "right.json").write_text(json.dumps(RIGHT), "utf-8")
    (tmp_path / "wrong.json").write_text(
        json.dumps({**RIGHT, "num_gpus": 2, "steps_per_print": "10", "amp": {}}), "utf-8"
    )
    return tmp_path


def test_what_lint_finds_is_scored_and_exits_0(corpus: Path) -> None:
    wrong = {"file": "wrong.json", "expected": "error", "unknown_top": "num_gpus", "late": "steps_per_print a string"}
    table(corpus / "truth.tsv", {"file": "right.json", "expected": "no-error", "unknown_top": "", "late": ""}, wrong)
    done = scored("--corpus", str(corpus))
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("1 of    1  100.0%") == 4


def test_a_miss_is_printed_and_exits_1(corpus: Path) -> None:
    table(
        corpus / "truth.tsv",
        {"file": "wrong.json", "expected": "no-error"},
        {"file": "right.json", "expected": "error"},
    )
    done = scored("--corpus", str(corpus))
    assert done.returncode == 1
    assert "miss: corpus: no error where none is: wrong.json: DSP" in done.stdout
    assert "2 misses" in done.stdout


def test_cases_get_the_arguments_of_their_context(corpus: Path) -> None:
    (corpus / "case.json").write_text(
        json.dumps({**RIGHT, "train_batch_size": "auto", "gradient_clipping": 0.5}), "utf-8"
    )
    same = {"file": "case.json", "about": "lint+args", "for": "trainer", "world_size": "1"}
    table(
        corpus / "expect.tsv",
        {**same, "id": "A", "severity": "error", "context": "HF max_grad_norm=1.0"},
        {**same, "id": "B", "severity": "ok", "context": "HF max_grad_norm=0.5"},
        {**same, "id": "C", "severity": "ok", "context": "nothing that is known"},
    )
    done = scored("--cases", str(corpus))
    assert done.returncode == 0, done.stdout
    assert "2 of    2" in done.stdout
    assert "skipped: C" in done.stdout


def test_a_folder_that_is_not_there_is_said_in_one_line(tmp_path: Path) -> None:
    done = scored("--corpus", str(tmp_path / "nowhere"))
    assert done.returncode == 2
    assert done.stdout.splitlines()[0] == f"{tmp_path / 'nowhere' / 'truth.tsv'} does not exist: not scored"
    assert done.stderr == ""
