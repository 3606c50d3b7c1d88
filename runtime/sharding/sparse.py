"""Embeddings with sparse=True, whose gradients FSDP2 cannot reduce: replicated beside it at ZeRO stage 0, in fp32."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from dsplan.schemas.problem import Problem
from torch import nn
from torch.distributed.device_mesh import DeviceMesh


def sparse_embeddings(model: nn.Module, zero_stage: int) -> dict[str, nn.Embedding | nn.EmbeddingBag]:
    """The model's trained embeddings with sparse=True, by name. Problem at ZeRO stages 1 to 3."""
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad
    }
    if found and zero_stage > 0:
        raise Problem(
            f"{next(iter(found))} is an embedding with sparse=True, whose gradients cannot be cut into shards (nor by "
            "DeepSpeed); build it with sparse=False, or use ZeRO stage 0"
        )
    return found


class SparseGradients:
    """The weights of these embeddings, plain tensors on every rank; the rows that have gradients are gathered and added."""

    def __init__(self, embeddings: dict[str, nn.Embedding | nn.EmbeddingBag], mesh: DeviceMesh, compute: torch.dtype):
        held = dict.fromkeys(embedding.weight for embedding in embeddings.values())
        self.weights = [weight for weight in held if isinstance(weight, nn.Parameter)]
        self._mesh = mesh
        if compute is not torch.float32:
            for embedding in embeddings.values():
                embedding.register_forward_hook(_cast_output(compute))

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Mean over the ranks. What got a gradient on no rank keeps none. Collective."""
        for weight in self.weights:
            weight.grad = _mean(weight, self._mesh)

    def drop_gradients(self) -> None:
        for weight in self.weights:
            weight.grad = None


def _cast_output(dtype: torch.dtype) -> Any:
    return lambda module, inputs, output: output.to(dtype)


def _mean(weight: nn.Parameter, mesh: DeviceMesh) -> torch.Tensor | None:
    """Rows of all ranks in the order of the ranks, each row once: equal on every rank, bit for bit.

    A weight that is also used densely (tied to the head, say) has a dense gradient on that rank; then it is one on all.
    """
    group, num_ranks = mesh.get_group(), mesh.size()
    grad = weight.grad
    if grad is not None and grad.is_sparse:
        grad = grad.coalesce()
    rows = 0 if grad is None else grad.indices().shape[1] if grad.is_sparse else -1
    told = torch.empty(num_ranks, dtype=torch.long, device=weight.device)
    dist.all_gather_into_tensor(told, torch.tensor([rows], device=weight.device), group=group)
    counts = told.tolist()
    if not any(counts):
        return None
    if min(counts) < 0:
        dense = torch.zeros_like(weight) if grad is None else grad.to_dense() if grad.is_sparse else grad
        dist.all_reduce(dense, group=group)
        return dense.div_(num_ranks)
    most = max(counts)
    indices = torch.zeros(most, dtype=torch.long, device=weight.device)
    values = torch.zeros(most, weight.shape[1], dtype=weight.dtype, device=weight.device)
    if grad is not None and rows > 0:
        indices[:rows], values[:rows] = grad.indices()[0], grad.values()
    all_indices = torch.empty(num_ranks * most, dtype=torch.long, device=weight.device)
    all_values = torch.empty(num_ranks * most, weight.shape[1], dtype=weight.dtype, device=weight.device)
    dist.all_gather_into_tensor(all_indices, indices, group=group)
    dist.all_gather_into_tensor(all_values, values, group=group)
    real = torch.cat([torch.arange(most, device=weight.device) < count for count in counts])
    summed = torch.sparse_coo_tensor(all_indices[real][None], all_values[real] / num_ranks, weight.shape)
    return summed.coalesce()
