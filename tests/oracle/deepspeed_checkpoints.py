"""Asks real DeepSpeed for checkpoints: `python tests/oracle/deepspeed_checkpoints.py`

Writes beside itself deepspeed_checkpoints.tar.xz (what engine.save_checkpoint wrote at step 3, a folder for each case) and
deepspeed_checkpoints.json (the losses of the steps after it, counters, and a digest of every fp32 weight that
DeepSpeed's own zero_to_fp32 gives). Needs deepspeed (recorded with 0.19.8: DS_BUILD_OPS=0 DS_ACCELERATOR=cpu pip install
deepspeed==0.19.8) and torch. fp16 needs the gate of DeepSpeed's CPU accelerator opened, which is done here.
`--only WORD` asks the cases whose name holds it, `--keep FOLDER` leaves the checkpoints there and writes nothing else.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from exchanged import CASES, CLIENT_STATE, SAVED_AT, STOP, Case, build, digest, run

HERE = Path(__file__).parent
BY_NAME = {case.name: case for case in CASES}


def worker(folder: str, *names: str) -> None:
    import deepspeed
    import torch
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    CPU_Accelerator.is_fp16_supported = lambda self: True
    vars(sys.modules["deepspeed.comm.torch"])["build_shm_op"] = lambda: None  # would compile an operator for minutes
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    for name in names:
        told = asked(deepspeed, BY_NAME[name], str(Path(folder, name)))
        if torch.distributed.get_rank() == 0:
            print(name, told["after"], file=sys.stderr, flush=True)
            Path(folder, name, "told.json").write_text(json.dumps(told))


def asked(deepspeed, case: Case, folder: str) -> dict:
    """What DeepSpeed answers for one case; its checkpoint is in the folder then."""
    import torch

    model, given = build(case, seed=0)
    engine, *_ = deepspeed.initialize(model=model, config=case.config(), **given)
    trains = case.optimizer != "none"
    before = run(engine, 0, SAVED_AT, trains)
    engine.save_checkpoint(folder, client_state=CLIENT_STATE)
    told = {"global_steps": engine.global_steps, "skipped_steps": engine.skipped_steps}
    if case.precision == "fp16":
        told["loss_scale"] = getattr(engine.optimizer, "loss_scale_config", engine.optimizer).cur_scale
    told |= {"before": before, "after": run(engine, SAVED_AT, STOP, trains), "skipped_at_end": engine.skipped_steps}
    weights = {}
    if case.zero_stage > 0 and torch.distributed.get_rank() == 0:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        state = get_fp32_state_dict_from_zero_checkpoint(folder)
        weights = {key: digest(tensor.contiguous()) for key, tensor in state.items()}
    return told | {"weights": weights}


def ask(ranks: int, names: list[str], folder: Path) -> dict[str, dict]:
    """What the ranks told of all cases that take that many; their checkpoints are in the folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    same = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            [sys.executable, __file__, "--worker", str(folder), *names],
            env=os.environ | same | {"RANK": str(rank), "LOCAL_RANK": str(rank), "DS_ACCELERATOR": "cpu"},
            stdout=sys.stderr,
        )
        for rank in range(ranks)
    ]
    if any([process.wait() for process in running]):
        raise SystemExit(f"one of {', '.join(names)} failed")
    answers = {}
    for name in names:
        for left in [*(folder / name).glob("zero_to_*.py"), folder / name / "told.json"]:
            if left.suffix == ".json":
                answers[name] = json.loads(left.read_text())
            left.unlink()
    return answers


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        return worker(*sys.argv[2:])
    only = sys.argv[sys.argv.index("--only") + 1] if "--only" in sys.argv else ""
    keep = Path(sys.argv[sys.argv.index("--keep") + 1]) if "--keep" in sys.argv else None
    folder = keep or Path(tempfile.mkdtemp())
    answers: dict[str, dict] = {}
    for ranks in (1, 2, 3):
        names = [case.name for case in CASES if case.ranks == ranks and only in case.name]
        answers |= ask(ranks, names, folder) if names else {}
    answers = {name: answers[name] for name in BY_NAME if name in answers}
    if keep:
        (folder / "told.json").write_text(json.dumps(answers))
        return
    (HERE / "deepspeed_checkpoints.json").write_text(
        json.dumps(answers, separators=(",", ":")).replace('},"z', '},\n"z') + "\n"
    )
    with tarfile.open(HERE / "deepspeed_checkpoints.tar.xz", "w:xz") as archive:
        archive.add(folder, arcname=".")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
