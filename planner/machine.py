"""What GPUs this machine has."""

from __future__ import annotations

from dsplan.schemas.cluster import Cluster, gpu_of


def local_cluster() -> Cluster:
    """The GPUs seen here, their kind by the driver's name; one GPU of unknown kind where none is seen."""
    import torch

    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not seen:
        return Cluster(nodes=1, gpus_per_node=1, gpu=None, text="local")
    properties = torch.cuda.get_device_properties(0)
    return Cluster(nodes=1, gpus_per_node=seen, gpu=gpu_of(properties.name, properties.total_memory), text="local")
