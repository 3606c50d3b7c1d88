"""What GPUs this machine has."""

from __future__ import annotations

from dsplan.schemas.cluster import Cluster, Gpu, find_gpu, gpus
from dsplan.schemas.problem import Problem


def local_cluster() -> Cluster:
    """The GPUs seen here, their kind by the driver's name; one GPU of unknown kind where none is seen."""
    import torch

    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not seen:
        return Cluster(nodes=1, gpus_per_node=1, gpu=None, text="local")
    properties = torch.cuda.get_device_properties(0)
    return Cluster(nodes=1, gpus_per_node=seen, gpu=gpu_of(properties.name, properties.total_memory), text="local")


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
