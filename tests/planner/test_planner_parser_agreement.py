"""Lint against DeepSpeed's own parser: who rejects what, on configurations with one thing wrong.

The verdicts are DeepSpeed 0.19.8's, recorded by tests/oracle/parse_verdicts.py (no accelerator; the number of ranks as given).
"""

import json
from functools import cache
from pathlib import Path

from dsplan.planner.auditing.linting import lint_text
from dsplan.schemas.cluster import parse_cluster
from helpers.strategies import PARTS, Mutant

RECORD = Path(__file__).parents[1] / "oracle" / "parse_verdicts.json"
KNOWN_DISAGREEMENTS = {
    "/aio/use_gds": "GPUDirect Storage is refused where there is no CUDA, as where the record was made; lint speaks of GPUs",
}
"""What was put where lint and the record differ, to the reason."""


@cache
def mutants() -> list[tuple[Mutant, str]]:
    """Each configuration, and "" or the class of DeepSpeed's error."""
    return [(Mutant.of(*row), verdict) for *row, verdict in json.loads(RECORD.read_text("utf-8"))]


def lint_rejects(mutant: Mutant) -> bool:
    text, cluster = json.dumps(mutant.config), parse_cluster(str(mutant.world_size))
    return any(
        finding.raises in ("load", "parse") for finding in lint_text(text, reader="deepspeed", cluster=cluster).findings
    )


def test_lint_rejects_what_deepspeed_rejects_when_it_parses() -> None:
    differ = [mutant for mutant, verdict in mutants() if lint_rejects(mutant) != bool(verdict)]
    assert [mutant for mutant in differ if mutant.put not in KNOWN_DISAGREEMENTS] == []
    assert len(differ) <= 0.01 * len(mutants())


def test_the_record_is_of_many_configurations_of_both_kinds() -> None:
    rejected = sum(bool(verdict) for _, verdict in mutants())
    assert len(mutants()) == 2000
    assert 600 < rejected < 1400
    assert {part for mutant, _ in mutants() for part in mutant.parts} == {
        (kind, name) for kind, names in PARTS.items() for name in names
    }


def test_what_nothing_is_done_to_is_accepted() -> None:
    untouched = [verdict for mutant, verdict in mutants() if not mutant.put]
    assert len(untouched) > 20
    assert set(untouched) == {""}
