"""Asks real DeepSpeed how the trainings of tests/helpers/traced.py go: `python tests/oracle/training_traces.py [NAME...]`

Writes training_traces.json beside itself: loss, gradient norm, learning rate, loss scale and skipped steps of each step, on
two gloo ranks. Without names it asks for every case, else for these alone. Needs deepspeed (recorded with 0.19.8:
DS_BUILD_OPS=0 DS_ACCELERATOR=cpu pip install deepspeed==0.19.8) and torch. fp16 needs the gate of DeepSpeed's CPU
accelerator opened, which is done here. On another kind of CPU the last digits differ.
"""

import json
import math
import os
import socket
import sys
import traceback
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "helpers"))
os.environ |= {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0", "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}

import deepspeed  # noqa: E402
import torch  # noqa: E402
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator  # noqa: E402
from traced import CASES, train  # noqa: E402

ANSWERS = HERE / "training_traces.json"
RANKS, DIGITS = 2, 10


def alone(name: str) -> bool:
    """What spoils its process for the next engine, or is spoilt: DeepSpeed keeps some of an engine in its modules."""
    return CASES[name]["config"]["zero_optimization"]["stage"] == 3 or "torch_autocast" in CASES[name]["config"]


def ask(names: list[str]) -> dict:
    """In forked processes of their own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = HERE / f"told.{port}.json"
    os.environ |= {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            try:
                answer(names, rank, told)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    if any([os.waitpid(child, 0)[1] for child in children]):
        raise SystemExit(f"DeepSpeed failed in one of {', '.join(names)}")
    answers = json.loads(told.read_text())
    told.unlink()
    return answers


def answer(names: list[str], rank: int, told: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    CPU_Accelerator.is_fp16_supported = lambda self: True
    vars(sys.modules["deepspeed.comm.torch"])["build_shm_op"] = lambda: None  # would compile an operator for minutes
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    answers = {}
    for name in names:
        steps = train(deepspeed.initialize, CASES[name])
        answers[name] = {key: [rounded(value) for value in values] for key, values in steps.items()}
    if rank == 0:
        told.write_text(json.dumps(answers))


def rounded(value: float) -> float | str:
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else "inf"


if __name__ == "__main__":
    answers = json.loads(ANSWERS.read_text()) if ANSWERS.exists() else {}
    asked = sys.argv[1:] or list(CASES)
    together = [name for name in asked if not alone(name)]
    for group in [*([together] if together else []), *([name] for name in asked if alone(name))]:
        answers |= ask(group)
        lines = [f' "{case}": {json.dumps(answers[case])}' for case in CASES if case in answers]
        ANSWERS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
