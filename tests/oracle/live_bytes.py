"""The peak of live tensors in one plain step of PyTorch, by torch's own MemTracker: asked once, recorded as live_bytes.json.

    python tests/oracle/live_bytes.py

fp32, real weights on cpu, a loop that keeps its batch and its loss; no engine and no code of ours but the nets.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed._tools.mem_tracker import MemTracker

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
from nets import NETS

RECORD = Path(__file__).with_suffix(".json")
MICRO_BATCH, LENGTH = 3, 64


def peak(name: str, micro_batch: int, length: int) -> int:
    """Bytes of everything that lives on the cpu at the fullest moment of forward and backward."""
    net = NETS[name]
    model = net.build().train()
    batch = net.batch(micro_batch, length)
    tracker = MemTracker()
    held: list[Any] = list(batch.values()) if isinstance(batch, dict) else list(batch)
    tracker.track_external(model, *held)
    with tracker:
        output = model(**batch) if isinstance(batch, dict) else model(*batch)
        loss = output.loss if net.loss is None else net.loss(output, batch)
        del output
        loss.backward()
    snapshot = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    return int(next(value for key, value in snapshot.items() if str(key).endswith("Total")))


def main() -> None:
    torch.manual_seed(0)
    made = [
        {"net": name, "micro_batch": MICRO_BATCH, "length": LENGTH, "peak_bytes": peak(name, MICRO_BATCH, LENGTH)}
        for name in NETS
        if name != "lora"  # the tracker hooks each parameter, and a frozen one takes no hook
    ]
    text = ",\n".join(f"  {json.dumps(row)}" for row in made)
    RECORD.write_text(f'{{"torch": "{torch.__version__}", "rows": [\n{text}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
