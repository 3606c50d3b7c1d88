"""Asks real DeepSpeed how many bytes a rank holds: `python tests/oracle/deepspeed_bytes.py > deepspeed_bytes.json`

Needs deepspeed (recorded with 0.19.8: DS_BUILD_OPS=0 DS_ACCELERATOR=cpu pip install deepspeed==0.19.8), torch and dsplan.
Two gloo ranks train examples/gpt.py, small, for three steps under a tracker that sees every storage from its birth. Written
for each configuration: bytes of rank 0 between steps, and at the peak of forward, backward and step of the third step.
"""

import gc
import itertools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

SIZES = {"layers": 4, "width": 128, "heads": 4, "vocab": 1000, "positions": 64}
MICRO_BATCH, SEQ_LEN, RANKS = 2, 64, 2
BUCKET = 200_000
"""Elements: less than the model, so that buckets are filled and emptied."""
CONFIGS = [
    {"zero_stage": stage, "precision": precision, "accumulation": accumulation}
    for stage, precision, accumulation in itertools.product((0, 1, 2, 3), ("fp32", "bf16"), (1, 2))
]


def ds_config(config: dict) -> dict:
    zero = {"stage": config["zero_stage"], "reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET}
    if config["zero_stage"] == 3:
        zero |= {"stage3_prefetch_bucket_size": BUCKET, "stage3_param_persistence_threshold": 1000}
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": config["accumulation"],
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero if config["zero_stage"] else {"stage": 0},
        "bf16": {"enabled": config["precision"] == "bf16"},
    }


def worker(rank: int, port: int, config: dict) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "DS_ACCELERATOR": "cpu"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    import deepspeed
    import torch
    from dsplan.runtime.measuring.storages import StorageTracker
    from gpt import build_model, loss

    vars(sys.modules["deepspeed.comm.torch"])["build_shm_op"] = lambda: None  # would compile an operator for minutes
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.manual_seed(0)
    peak = 0

    def grown() -> None:
        nonlocal peak
        peak = max(peak, tracker.total_bytes)

    def measured(act) -> int:
        nonlocal peak
        peak = tracker.total_bytes
        act()
        return peak

    seen = {"forward": 0, "backward": 0, "step": 0}
    with (tracker := StorageTracker(on_growth=grown)):
        model = build_model(**SIZES)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config(config))
        tokens = torch.randint(0, SIZES["vocab"], (MICRO_BATCH, SEQ_LEN))
        for _ in range(3):
            gc.collect()
            seen = {"resident": tracker.total_bytes, "forward": 0, "backward": 0, "step": 0}
            for _ in range(config["accumulation"]):
                held = []
                seen["forward"] = max(seen["forward"], measured(lambda: held.append(loss(engine(tokens), (tokens,)))))  # noqa: B023
                seen["backward"] = max(seen["backward"], measured(lambda: engine.backward(held[0])))  # noqa: B023
                held.clear()
                seen["step"] = max(seen["step"], measured(engine.step))
    if rank == 0:
        print("RECORD " + json.dumps({**config, **seen}), flush=True)
    os._exit(0)


def main() -> None:
    from importlib.metadata import version

    records = []
    for config in CONFIGS:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, __file__, "worker"]
        ranks = [
            subprocess.Popen([*command, str(rank), str(port), json.dumps(config)], stdout=subprocess.PIPE, text=True)
            for rank in range(RANKS)
        ]
        out = [process.communicate(timeout=300)[0] for process in ranks]
        lines = [line for line in out[0].splitlines() if line.startswith("RECORD ")]
        assert lines, f"{config}: no record"
        records.append(json.loads(lines[0].removeprefix("RECORD ")))
        print(records[-1], file=sys.stderr)
    head = {"deepspeed": version("deepspeed"), "sizes": SIZES, "micro_batch": MICRO_BATCH}
    lines = [f"  {json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
    rows = ",\n".join(f"    {json.dumps(record)}" for record in records)
    print("\n".join(["{", *lines, '  "records": [', rows, "  ]", "}"]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
    else:
        main()
