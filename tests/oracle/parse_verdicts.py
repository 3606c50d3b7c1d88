"""Asks real DeepSpeed which configurations it takes when it parses them, and lint whether it says so.

    python tests/oracle/parse_verdicts.py --record           writes parse_verdicts.json (seed 0, 2000 configurations)
    python tests/oracle/parse_verdicts.py --seed 7 --count 2000   prints the agreement on configurations of another seed

Needs hypothesis, dsplan and deepspeed (recorded with 0.19.8: DS_BUILD_OPS=0 DS_ACCELERATOR=cpu pip install
deepspeed==0.19.8); where deepspeed is installed for another Python, --python names that one. The configurations are those of
tests/helpers/strategies.py. Each is written as JSON, read with DeepSpeed's own loader (hjson, duplicates refused) and handed to
its DeepSpeedConfig, in one process; only the number of ranks that deepspeed.comm tells is replaced.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RECORD = HERE / "parse_verdicts.json"
sys.path.insert(0, str(HERE.parent))


def drawn(seed: int, count: int) -> list[Any]:
    """That many different mutants of that seed."""
    import hypothesis
    from helpers.strategies import mutants

    found: dict[str, Any] = {}

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count + count // 4,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(mutants())
    def draw(mutant: Any) -> None:
        if len(found) < count:
            found.setdefault(json.dumps([mutant.config, mutant.world_size], sort_keys=True), mutant)

    draw()
    return list(found.values())


def verdicts(configs: Sequence[tuple[str, int]]) -> Iterator[str]:
    """Of each (text, ranks): "" where DeepSpeed takes it, else the error's class."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with contextlib.redirect_stdout(io.StringIO()):
        import hjson
        from deepspeed.runtime import config as ds
        from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys
    logging.disable(logging.CRITICAL)
    for text, ranks in configs:
        ds.dist.get_world_size = lambda group=None, ranks=ranks: ranks
        ds.dist.get_rank = lambda group=None: 0
        try:
            ds.DeepSpeedConfig(hjson.loads(text, object_pairs_hook=dict_raise_error_on_duplicate_keys))
            yield ""
        except Exception as error:
            yield type(error).__name__


def asked(configs: Sequence[tuple[str, int]], python: str) -> list[str]:
    """The verdicts that DeepSpeed of that Python gives."""
    lines = "".join(json.dumps(config) + "\n" for config in configs)
    done = subprocess.run([python, __file__, "--answer"], input=lines, stdout=subprocess.PIPE, text=True, check=True)
    answers: list[str] = json.loads(done.stdout.splitlines()[-1])
    return answers


def lint_rejects(text: str, ranks: int) -> bool:
    """Lint says that DeepSpeed raises when it reads or parses the text."""
    from dsplan.planner.auditing.linting import lint_text
    from dsplan.schemas.cluster import parse_cluster

    found = lint_text(text, reader="deepspeed", cluster=parse_cluster(str(ranks))).findings
    return any(finding.raises in ("load", "parse") for finding in found)


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--record", action="store_true")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--count", type=int, default=2000)
    options.add_argument("--python", default=sys.executable, help="the Python that has deepspeed")
    options.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.answer:
        print(json.dumps(list(verdicts([json.loads(line) for line in sys.stdin]))))
        return
    mutants = drawn(chosen.seed, chosen.count)
    configs = [(json.dumps(mutant.config), mutant.world_size) for mutant in mutants]
    answers = asked(configs, chosen.python)
    if chosen.record:
        rows = [
            json.dumps([[name for _, name in m.parts], m.world_size, m.remove, m.put, m.value, answer])
            for m, answer in zip(mutants, answers, strict=True)
        ]
        RECORD.write_text("[\n" + ",\n".join(rows) + "\n]\n", "utf-8")
    wrong = 0
    for mutant, (text, ranks), answer in zip(mutants, configs, answers, strict=True):
        if lint_rejects(text, ranks) != bool(answer):
            wrong += 1
            done = f"{mutant.remove or '-'} -> {mutant.put or '-'} = {json.dumps(mutant.value)}"
            print(
                f"DeepSpeed {answer or 'accepts'}, lint {'accepts' if answer else 'rejects'}: {done}; ranks {ranks}; {text}"
            )
    total = len(configs)
    print(
        f"{total - wrong} of {total} agree: {(total - wrong) / total:.2%}; DeepSpeed rejects {sum(map(bool, answers))}"
    )


if __name__ == "__main__":
    main()
