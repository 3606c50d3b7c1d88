"""The GPUs that a plan is for: how many, of what kind, how they are linked."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dsplan.schemas.problem import Problem
from dsplan.schemas.units import GB, GIB, size
from dsplan.schemas.validation import schema_errors


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One kind of GPU. Rates are dense peaks; None where the source gives none."""

    name: str
    memory_bytes: int
    """Nominal, as sold."""
    usable_bytes: int
    """What the driver shows to PyTorch ("total capacity" of its out-of-memory message)."""
    flops_per_second: dict[str, float]
    """By precision: fp32, fp16, bf16. A precision that the GPU's tensor cores lack is absent."""
    memory_bytes_per_second: float
    link_bytes_per_second: float
    """One way, one GPU, to the others in its node."""
    inter_node_bytes_per_second: float
    """One way, one GPU's share of the network."""
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """nodes x gpus_per_node ranks. gpu None: of unknown kind, so no verdict and no time."""

    nodes: int
    gpus_per_node: int
    gpu: Gpu | None
    text: str
    """As the user wrote it."""
    reserve_bytes: int = 0
    """Of each GPU's memory, kept for a neighbour: taken off its usable_bytes already."""
    host_memory_bytes: int | None = None
    """Of one node; None: not known, so no verdict on the host."""
    expandable_segments: bool = False
    """Ranks run under PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."""

    def reserving(self, num_bytes: int) -> Cluster:
        """The same cluster with so much of each GPU left to others. Problem where that is all of it, or the GPU is not known."""
        if num_bytes == 0:
            return self
        if self.gpu is None:
            raise Problem(
                f"--reserve {size(num_bytes)} is taken off what a GPU has, but the kind of GPU is not known; name it, as in "
                f"--cluster {self.ranks}xA100-80GB"
            )
        left = self.gpu.usable_bytes - num_bytes
        if left <= 0:
            raise Problem(
                f"--reserve {size(num_bytes)} leaves nothing of the {size(self.gpu.usable_bytes)} that {self.gpu.name} has; "
                "give less"
            )
        return replace(self, gpu=replace(self.gpu, usable_bytes=left), reserve_bytes=self.reserve_bytes + num_bytes)

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus_per_node

    def to_json(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "nodes": self.nodes,
            "gpus_per_node": self.gpus_per_node,
            "ranks": self.ranks,
            "gpu": self.gpu.name if self.gpu else None,
            "usable_bytes": self.gpu.usable_bytes if self.gpu else None,
            **({"reserve_bytes": self.reserve_bytes} if self.reserve_bytes else {}),
        }

    def __str__(self) -> str:
        if self.gpu is None:
            return f"{self.ranks} GPU{'s' if self.ranks > 1 else ''} of unknown kind"
        nodes = f"{self.nodes} nodes x " if self.nodes > 1 else ""
        kept = f" after {size(self.reserve_bytes)} reserved" if self.reserve_bytes else ""
        return f"{nodes}{self.gpus_per_node} x {self.gpu.name} ({self.gpu.usable_bytes / GIB:.1f} GiB usable{kept})"


@functools.cache
def gpus() -> dict[str, Gpu]:
    """Every known GPU by its name, from gpus.json."""
    raw = json.loads(Path(__file__).with_name("gpus.json").read_text("utf-8"))
    table = {}
    for name, entry in raw["gpus"].items():
        table[name] = Gpu(
            name=name,
            memory_bytes=round(entry["memory_gb"] * GB),
            usable_bytes=round(entry["usable_gib"] * GIB),
            flops_per_second={key: value * 1e12 for key, value in entry["tflops"].items()},
            memory_bytes_per_second=entry["memory_gb_per_second"] * 1e9,
            link_bytes_per_second=entry["link_gb_per_second"] * 1e9,
            inter_node_bytes_per_second=entry["inter_node_gb_per_second"] * 1e9,
            source=entry["source"],
        )
    return table


@functools.cache
def aliases() -> dict[str, str]:
    """Other spellings, lower case, to names."""
    raw = json.loads(Path(__file__).with_name("gpus.json").read_text("utf-8"))
    table = {name.lower(): name for name in raw["gpus"]}
    for name, entry in raw["gpus"].items():
        table |= {alias.lower(): name for alias in entry["aliases"]}
    return table


USABLE_SHARE = 0.99
"""Of the nominal memory, where a file names no usable_gib: the least among the cards of gpus.json with 40 GB or more."""
DEFAULT_NETWORK = 12.5
"""GB per second and GPU, where a file names none: 100 Gbit/s, the least among the data-centre cards of gpus.json."""
_FORM = re.compile(r"(?:(\d+)\s*[xX*]\s*)?(\d+)(?:\s*[xX*]\s*([A-Za-z][\w.+-]*))?")


def parse_cluster(text: str) -> Cluster:
    """Cluster of "8xH100-80GB", "4x8xA100-80GB" (nodes x GPUs), "8" (of unknown kind), or a JSON file.

    A file holds {"nodes": 4, "gpus_per_node": 8, "host_memory_gb": 1000, "gpu": NAME or an entry as in gpus.json}.
    "local" is not resolved here: it takes a look at the machine.
    """
    stripped = text.strip()
    if stripped.endswith(".json") or "/" in stripped:
        return _from_file(stripped)
    match = _FORM.fullmatch(stripped)
    if not match:
        raise Problem(
            f"--cluster {text!r} cannot be read; write GPUs x kind (8xH100-80GB), nodes x GPUs x kind "
            "(4x8xA100-80GB), a number (8), a .json file, or local"
        )
    nodes, per_node, kind = int(match[1] or 1), int(match[2]), match[3]
    if nodes < 1 or per_node < 1:
        raise Problem(f"--cluster {text!r} has no GPU; write at least 1")
    return Cluster(nodes=nodes, gpus_per_node=per_node, gpu=find_gpu(kind) if kind else None, text=stripped)


def find_gpu(kind: str) -> Gpu:
    """The GPU of that name or alias (any case). Problem with the near names where there is none."""
    name = aliases().get(kind.lower())
    if name:
        return gpus()[name]
    import difflib

    near = difflib.get_close_matches(kind.lower(), aliases(), n=3, cutoff=0.4)
    family = [alias for alias in aliases() if kind.lower().split("-")[0] in alias]
    names = list(dict.fromkeys(aliases()[key] for key in (near or family or aliases())))
    raise Problem(
        f"GPU {kind!r} is not known; known are for example {', '.join(names[:6])} (or describe it in a .json file)"
    )


def _from_file(path: str) -> Cluster:
    try:
        raw = json.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise Problem(
            f"{path}: cannot be read ({error.strerror}); --cluster takes a file or a form like 8xH100-80GB"
        ) from error
    except ValueError as error:
        raise Problem(f"{path}: is not JSON ({error})") from error
    wrong = schema_errors("cluster", raw)
    if wrong:
        raise Problem(
            f'{path}: {"; ".join(wrong)}; a cluster is {{"nodes": 1, "gpus_per_node": 8, "gpu": "H100-80GB"}}'
        )
    gpu = raw.get("gpu")
    if isinstance(gpu, dict):
        kind: Gpu | None = Gpu(
            name=str(gpu.get("name", "custom")),
            memory_bytes=round(gpu["memory_gb"] * GB),
            usable_bytes=round(gpu.get("usable_gib", gpu["memory_gb"] * GB / GIB * USABLE_SHARE) * GIB),
            flops_per_second={key: value * 1e12 for key, value in gpu["tflops"].items()},
            memory_bytes_per_second=gpu["memory_gb_per_second"] * 1e9,
            link_bytes_per_second=gpu["link_gb_per_second"] * 1e9,
            inter_node_bytes_per_second=gpu.get("inter_node_gb_per_second", DEFAULT_NETWORK) * 1e9,
            source=path,
        )
    else:
        kind = find_gpu(gpu) if gpu is not None else None
    host = raw.get("host_memory_gb")
    return Cluster(
        nodes=raw.get("nodes", 1),
        gpus_per_node=raw["gpus_per_node"],
        gpu=kind,
        text=path,
        host_memory_bytes=round(host * GB) if host is not None else None,
    )


def gpu_of(driver_name: str, total_bytes: int) -> Gpu | None:
    """The known GPU that "NVIDIA H100 80GB HBM3" with so much memory is; None where none is near."""
    words = driver_name.upper().replace("NVIDIA", "").replace("-", " ").split()
    if not words:
        return None
    near = [gpu for gpu in gpus().values() if abs(gpu.usable_bytes - total_bytes) < 0.06 * total_bytes]
    joined = "".join(words)
    family = [gpu for gpu in near if gpu.name.split("-")[0].upper() in joined]
    if family:  # the longest name (L40S before L4), and PCIe only where the driver says so
        return max(family, key=lambda gpu: (len(gpu.name.split("-")[0]), ("PCIe" in gpu.name) == ("PCIE" in joined)))
    try:
        return find_gpu(words[0])
    except Problem:
        return None
