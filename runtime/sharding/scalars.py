"""Parameters without a dimension, which FSDP2 cannot hold: replicated beside it, in fp32, their gradients averaged here."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate


class Scalars:
    """The 0-dim parameters of a model. The model keeps its own, as plain tensors; the optimizer steps over `masters`.

    A master is a DTensor over the very same bytes: optimizers cannot mix plain tensors with the shards. In half precision
    the model's own stays fp32, since a tensor without a dimension never widens what it is combined with.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], mesh: DeviceMesh):
        self._held = parameters
        self._mesh = mesh
        self.masters = {
            name: nn.Parameter(self._distributed(parameter.data), requires_grad=parameter.requires_grad)
            for name, parameter in parameters.items()
        }

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Mean over the ranks, handed on to the masters. What got a gradient on no rank keeps none. Collective."""
        trained = [name for name, parameter in self._held.items() if parameter.requires_grad]
        if not trained:
            return
        grads = [self._held[name].grad for name in trained]
        zero = torch.zeros((), device=self._held[trained[0]].device)
        values = torch.stack([zero if grad is None else grad.float() for grad in grads])
        present = torch.stack([zero if grad is None else zero + 1 for grad in grads])
        both = torch.stack([values, present])
        dist.all_reduce(both, group=self._mesh.get_group())
        values, present = both[0] / self._mesh.size(), both[1]
        for index, name in enumerate(trained):
            if present[index].item() > 0:
                self._held[name].grad = values[index].clone()
                self.masters[name].grad = self._distributed(self._held[name].grad)

    def held(self) -> list[nn.Parameter]:
        """The model's own."""
        return list(self._held.values())

    def model_holds(self, name: str, parameter: torch.Tensor) -> bool:
        """Whether it is the model's own of that name."""
        return self._held.get(name) is parameter

    def drop_gradients(self) -> None:
        for name, parameter in self._held.items():
            parameter.grad = self.masters[name].grad = None

    def _distributed(self, tensor: torch.Tensor | None) -> DTensor:
        assert tensor is not None
        return DTensor.from_local(tensor, self._mesh, [Replicate()], run_check=False)
