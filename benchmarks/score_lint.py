"""Scores lint on real configurations and on single faults: `python benchmarks/score_lint.py --corpus DIR --cases DIR`

CORPUS holds *.json and truth.tsv. Of its columns these are read, where they are there: file; expected (no-error, error, any);
unknown_* (names by comma: each must be named in some finding); late (faults by semicolon: each must be found).
CASES holds files and expect.tsv: id, file, about (lint, lint+args, lint+model; others are not scored), severity (error,
warning, info, ok: no error), for (the reader), world_size, context. What a case's script would have is made from its context:
"HF per_device_train_batch_size=1" is a file of TrainingArguments, "pp=4" the block in which a file tells lint of its stages.
Prints a table of scores and each miss; exit code 1 where there is one.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsplan.planner.auditing.linting import lint
from dsplan.schemas.cluster import parse_cluster
from dsplan.schemas.finding import READERS, FileFindings, Finding
from dsplan.schemas.problem import Problem

SEVERITIES = ("error", "warning", "info")
OTHER_NAMES = {"with_args": "--args", "with_model": "--model"}
ABSENT = ("", "none", "nan", "-")
FLAG = re.compile(r"(?:^|\s)--?([a-z]\w*)(?:[= ]([^\s-]\S*))?")
PAIR = re.compile(r"([a-z]\w*)=(\S+)")
WITHOUT = re.compile(r"without --(\w+)")


@dataclass(frozen=True)
class Check:
    """One thing that was asked of lint."""

    group: str
    name: str
    met: bool
    why: str


def rows(table: Path) -> list[dict[str, str]]:
    with table.open(encoding="utf-8", newline="") as file:
        return [{key: value or "" for key, value in row.items() if key} for row in csv.DictReader(file, delimiter="\t")]


def linted(path: Path, **options: Any) -> tuple[list[Finding], str]:
    """The findings of a file; one line where lint could not run."""
    try:
        found: Sequence[FileFindings] = lint([str(path)], **options)
    except Problem as problem:
        return [], str(problem)
    return [finding for file in found for finding in file.findings], ""


def told(findings: Sequence[Finding], severities: Sequence[str] = SEVERITIES) -> str:
    said = [f"{finding.rule} {finding.severity} {finding.pointer}" for finding in findings]
    return "; ".join(line for line in said if line.split()[1] in severities) or "nothing"


def words(text: str, by: str = ",") -> list[str]:
    return [word.strip() for word in text.split(by) if word.strip().lower() not in ABSENT]


def names(finding: Finding, key: str) -> bool:
    """The finding is about the key, or says its name."""
    last = key.rpartition(".")[2]
    pointer = "/" + key.replace(".", "/")
    whole = re.compile(rf"(?<![\w]){re.escape(last)}(?![\w])")
    return finding.pointer in (pointer, f"/{last}") or bool(whole.search(f"{finding.pointer} {finding.message}"))


def finds(finding: Finding, fault: str, text: str) -> bool:
    """The finding is about one of the keys that the fault's text names; it begins with the key.

    Where the key's value is a placeholder, a finding that names the placeholder as not filled.
    """
    spoken = re.findall(r"[A-Za-z_][\w.]*\w", fault)
    if finding.severity != "info":
        return any("_" in word or word == spoken[0] for word in spoken if names(finding, word))
    held = re.search(rf'"{re.escape(spoken[0].rpartition(".")[2])}"\s*:\s*([A-Z]\w*)', text)
    return bool(held) and finding.rule.startswith("DSP07") and held[1] in re.findall(r"\w+", finding.message)


def corpus_checks(folder: Path) -> Iterator[Check]:
    for row in rows(folder / "truth.tsv"):
        path = folder / row["file"]
        text = path.read_text("utf-8", errors="replace")
        findings, problem = linted(path)
        errors = [finding for finding in findings if finding.severity == "error"]
        expected = row.get("expected", "any").strip()
        if expected == "no-error":
            yield Check(
                "corpus: no error where none is", row["file"], not errors and not problem, problem or told(errors)
            )
        elif expected == "error":
            met = bool(errors or problem)
            yield Check("corpus: an error where one is", row["file"], met, row.get("error", "")[:120])
        for column in (name for name in row if name.startswith("unknown_")):
            for key in words(row[column]):
                met = any(names(finding, key) for finding in findings)
                yield Check("corpus: unknown keys named", row["file"], met, f"{key}; said: {told(findings)}")
        for fault in words(row.get("late", ""), ";"):
            met = any(finds(finding, fault, text) for finding in findings)
            yield Check("corpus: late faults found", row["file"], met, f"{fault}; said: {told(findings)}")


def case_checks(folder: Path, made: Path) -> Iterator[Check | str]:
    """A check per case; a line of text for one that is not scored."""
    for row in rows(folder / "expect.tsv"):
        about, path = row.get("about", "lint").strip(), folder / row["file"]
        if not about.startswith("lint"):
            continue
        options: dict[str, Any] = {}
        reader, ranks = row.get("for", "").strip(), row.get("world_size", "").strip()
        if reader in READERS:
            options["reader"] = reader
        if ranks.isdigit():
            options["cluster"] = parse_cluster(ranks)
        for need in about.split("+")[1:]:
            companion = (training_arguments if need == "args" else model)(row, folder, made)
            if companion is None:
                yield f"{row.get('id', row['file'])}: no {need} for it"
                break
            options[need] = str(companion)
        else:
            findings, problem = linted(with_stages(row, path, made), **options)
            yield Check(
                f"cases: {about}",
                row.get("id", row["file"]),
                judged(row, findings, problem),
                why(row, findings, problem),
            )


def judged(row: dict[str, str], findings: Sequence[Finding], problem: str) -> bool:
    wanted = row.get("severity", "").strip() or "ok"
    if wanted == "ok":
        return not problem and not any(finding.severity == "error" for finding in findings)
    return wanted in [finding.severity for finding in findings] or (wanted == "error" and bool(problem))


def why(row: dict[str, str], findings: Sequence[Finding], problem: str) -> str:
    return f"{row.get('severity')}: {row.get('expect', '')[:120]}; said: {problem or told(findings)}"


def with_stages(row: dict[str, str], path: Path, made: Path) -> Path:
    """The case; where its context speaks of pipeline stages, a copy that says so itself."""
    stages = dict(PAIR.findall(row.get("context", ""))).get("pp", "")
    if not stages.isdigit() or path.suffix != ".json":
        return path
    copy = made / path.name
    config = json.loads(path.read_text("utf-8"))
    copy.write_text(json.dumps({**config, "dsplan": {"pipeline_stages": int(stages)}}, indent=2), "utf-8")
    return copy


def training_arguments(row: dict[str, str], folder: Path, made: Path) -> Path | None:
    """A file beside the case, or one of TrainingArguments made from its context."""
    for ending in (".args.yaml", ".args.json", ".yaml", ".yml"):
        if (beside := folder / f"{Path(row['file']).stem}{ending}").exists():
            return beside
    context = row.get("context", "")
    values = {name: value for name, value in PAIR.findall(context)}
    values |= {name: "false" for name in WITHOUT.findall(context)}
    if not values:
        return None
    values.setdefault("output_dir", "out")
    values.setdefault("per_device_train_batch_size", "8")
    path = made / f"{Path(row['file']).stem}.args.yaml"
    path.write_text("".join(f"{name}: {value}\n" for name, value in values.items()), "utf-8")
    return path


MODELS = {
    "hidden_size": """
import torch
from torch import nn


class Config:
    model_type = "own"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = Config()
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        return self.layer(x).sum()


def build_model():
    return Model()


def sample_batch(micro_batch, seq_len=None):
    return (torch.zeros(micro_batch, 64),)
""",
    "torch.optim": """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        return self.layer(x).sum()


def build_model():
    return Model()


def sample_batch(micro_batch, seq_len=None):
    return (torch.zeros(micro_batch, 64),)


def build_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-4)
""",
}
"""A word of the context, to the model that it speaks of."""


def model(row: dict[str, str], folder: Path, made: Path) -> Path | None:
    """A file beside the case, or the model that its context speaks of."""
    if (beside := folder / f"{Path(row['file']).stem}.py").exists():
        return beside
    for word, text in MODELS.items():
        if word in row.get("context", ""):
            path = made / f"{Path(row['file']).stem}_model.py"
            path.write_text(text, "utf-8")
            return path
    return None


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--corpus", type=Path)
    options.add_argument("--cases", type=Path)
    chosen = options.parse_args()
    checks: list[Check] = []
    skipped: list[str] = []
    scored = False
    with tempfile.TemporaryDirectory() as made:
        for folder, table, run in (
            (chosen.corpus, "truth.tsv", corpus_checks),
            (chosen.cases, "expect.tsv", lambda folder: case_checks(folder, Path(made))),
        ):
            if folder is None:
                continue
            if not (folder / table).is_file():
                print(f"{folder / table} does not exist: not scored")
                continue
            scored = True
            for entry in run(folder):
                (skipped if isinstance(entry, str) else checks).append(entry)  # type: ignore[arg-type]
    if not scored:
        print("nothing was scored; give --corpus DIR or --cases DIR")
        return 2
    for group in dict.fromkeys(check.group for check in checks):
        members = [check for check in checks if check.group == group]
        met = sum(check.met for check in members)
        print(f"{group:34} {met:4} of {len(members):4}  {met / len(members):6.1%}")
    for line in skipped:
        print(f"skipped: {line}")
    misses = [check for check in checks if not check.met]
    for check in misses:
        print(f"miss: {check.group}: {check.name}: {check.why}")
    print(f"{len(misses)} misses, {len(skipped)} skipped")
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
