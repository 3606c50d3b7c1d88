"""Trains small models for real under the native engine: `python tests/oracle/native_bytes.py > tests/oracle/native_bytes.json`

2 to 4 gloo ranks, two optimizer steps, seen by the meter. Written for each cell: what rank 0 held at the peak of forward,
backward and step, and between steps; and the same of a rehearsal of the plan. Takes ten minutes and needs transformers.
`--only N` asks the Nth cell alone.
"""

import itertools
import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import ranks
from dsplan.planner.rehearsing.native import rehearse
from dsplan.schemas.layout import Layout
from dsplan.schemas.ledger import STEP_PHASES, Ledger
from dsplan.schemas.plan import Plan
from measured import measured_net
from nets import NETS, subject
from ranks import run_ranks

CELLS_PER_NET = 6
SEED = 7


def cells() -> list[dict]:
    """Six of each net: every ZeRO stage, precision, accumulation and recompute comes up with each of the others."""
    chance = random.Random(SEED)
    chosen = []
    for net in NETS:
        ways = list(itertools.product((0, 1, 2, 3), ("fp32", "bf16", "fp16"), (1, 2, 4), ("none", "full")))
        if net == "mixtral":  # its grouped multiplications take bf16 alone
            ways = [way for way in ways if way[1] == "bf16"]
        for number, way in enumerate(chance.sample(ways, CELLS_PER_NET)):
            zero_stage, precision, accumulation, recompute = way
            cell = {"net": net, "ranks": 2 + number % 3, "micro_batch": 1 + number % 2, "zero_stage": zero_stage}
            chosen.append(cell | {"precision": precision, "accumulation": accumulation, "recompute": recompute})
    return chosen


def plan_of(cell: dict) -> Plan:
    same = {name: cell[name] for name in ("zero_stage", "precision", "micro_batch", "accumulation", "recompute")}
    return Plan(engine="native", layout=Layout(dp_shard=cell["ranks"]), seq_len=NETS[cell["net"]].seq_len, **same)


def phases(book: Ledger) -> dict[str, int]:
    return {phase: book.phase_bytes(phase) for phase in STEP_PHASES} | {"resident": book.resident_bytes}


def asked(cell: dict) -> dict:
    options = [cell[name] for name in ("micro_batch", "precision", "zero_stage", "accumulation", "recompute")]
    measured = Ledger.from_json(run_ranks(cell["ranks"], measured_net, cell["net"], *options)[0])
    rehearsed = rehearse(subject(cell["net"]), plan_of(cell))
    return cell | {"measured": phases(measured), "rehearsed": phases(rehearsed)}


def main() -> None:
    wanted = cells()
    if "--only" in sys.argv:
        wanted = [wanted[int(sys.argv[-1])]]
    answers = []
    ranks.LIMIT_SECONDS = 600  # the first cell of each number of ranks imports transformers
    for number, cell in enumerate(sorted(wanted, key=lambda cell: cell["ranks"])):
        try:
            answers.append(asked(cell))
        except Exception as error:
            print(f"{number} {cell}: {type(error).__name__}: {str(error)[-600:]}", file=sys.stderr)
            continue
        held, said = answers[-1]["measured"], answers[-1]["rehearsed"]
        print(number, cell, {key: f"{said[key] / held[key] - 1:+.2%}" for key in held}, file=sys.stderr)
    print("[\n" + ",\n".join(json.dumps(answer) for answer in answers) + "\n]")


if __name__ == "__main__":
    main()
