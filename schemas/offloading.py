"""What of a DeepSpeed JSON speaks of the host's memory, as the native engine reads it.

Source: deepspeed/runtime/zero/{config,offload_config}.py (0.19.8). One difference: DeepSpeed leaves the optimizer on the device
at ZeRO stage 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

ON_HOST = ("cpu", "nvme")
LEGACY = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
OF_NVME = ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pipeline_read", "pipeline_write", "fast_init")
"""Keys that only tune NVMe offload: DeepSpeed itself reads them nowhere else."""


@dataclass(frozen=True)
class Offloading:
    """ratio: the share of the units, by parameters, that live on the host."""

    what: Literal["none", "optimizer", "param"] = "none"
    ratio: float = 1.0
    pin_memory: bool = True


def offloading(raw: Mapping[str, Any], zero_stage: int) -> Offloading:
    zero = raw.get("zero_optimization")
    blocks = _blocks(zero) if isinstance(zero, Mapping) else {}
    param, optimizer = blocks.get("offload_param"), blocks.get("offload_optimizer")
    if param is not None and zero_stage == 3:
        return Offloading("param", pin_memory=param.get("pin_memory", True) is not False)
    if optimizer is None:
        return Offloading()
    ratio = optimizer.get("ratio", 1.0)
    return Offloading(
        "optimizer",
        ratio=float(ratio) if isinstance(ratio, (int, float)) else 1.0,
        pin_memory=optimizer.get("pin_memory", True) is not False,
    )


def on_host(sizes: Sequence[int], ratio: float) -> list[bool]:
    """For each unit, by its parameters, whether it goes to the host: the first ones do, until they hold the share."""
    wanted, held = ratio * sum(sizes), 0
    chosen: list[bool] = []
    for size in sizes:
        chosen.append(held < wanted)
        held += size
    return chosen


def _blocks(zero: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The blocks that name a device on the host; cpu_offload: true is short for one with device cpu."""
    found: dict[str, Mapping[str, Any]] = {}
    for old, name in LEGACY.items():
        block = zero.get(name)
        if not isinstance(block, Mapping) and zero.get(old) is True:
            block = {"device": "cpu"}
        if isinstance(block, Mapping) and block.get("device") in ON_HOST:
            found[name] = block
    return found


def reasons(raw: Mapping[str, Any], zero_stage: int) -> Iterator[tuple[str, Literal["error", "warning"], str]]:
    """(pointer, level, text) for what of it is not carried out."""
    zero = raw.get("zero_optimization")
    if not isinstance(zero, Mapping):
        return
    for name, block in _blocks(zero).items():
        at = f"/zero_optimization/{name}"
        if block["device"] == "nvme":
            yield (
                f"{at}/device",
                "error",
                "NVMe is not carried out by the native engine; use cpu, or --engine deepspeed",
            )
        if block.get("super_offload") is True:
            yield f"{at}/super_offload", "error", "is DeepSpeed's own; remove it, or use --engine deepspeed"
        if block.get("ratio", 1.0) not in (1, "auto") and zero_stage != 3:
            yield f"{at}/ratio", "error", "DeepSpeed refuses it too below ZeRO stage 3; remove it"
        if name == "offload_param" and zero_stage != 3:
            yield at, "warning", "no effect below ZeRO stage 3: parameters are not sharded there"
        for key in OF_NVME if block["device"] == "cpu" else ():
            if key in block and block[key] not in (None, False, "auto"):
                yield f"{at}/{key}", "warning", "no effect without NVMe"
        if "cpuadam_cores_perc" in block:
            yield f"{at}/cpuadam_cores_perc", "warning", "no effect without super_offload"
