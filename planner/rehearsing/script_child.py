"""The child that rehearses a script: what its `initialize` gives is an engine of ours, or DeepSpeed's, on fake tensors.

The script's loop calls it: forward, its own loss, backward, step, until two optimizer steps are over. Between these calls all
is as it was, so that data are read and metrics computed as in a real run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from dsplan.planner.capturing import capture_child
from dsplan.planner.capturing.captured import Captured, Engine, Recording, batch_of, check_backward
from dsplan.planner.capturing.confining import Confinement
from dsplan.planner.capturing.resizing import Resize
from dsplan.planner.models.weightless import Inputs, Stand, fakes
from dsplan.planner.rehearsing.rehearsal import MICRO_BATCHES, Rehearsal
from dsplan.planner.rehearsing.scripts import Order
from dsplan.planner.tracing.kernels import NormalValues
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

_register_parameter = nn.Module.register_parameter
"""torch's own: while a script builds its model, parameters go to meta."""


def main() -> None:
    capture_child.main(_recording)


def _recording(request: dict[str, Any], confinement: Confinement) -> Recording:
    order = Order.unpacked(request["order"])
    return _Rehearsing(order, confinement, request["script"], request["micro_batch"])


class _Rehearsing(Recording):
    """Gives a script the engine that its plan names."""

    def __init__(self, order: Order, confinement: Confinement, source: str, micro_batch: int | None):
        super().__init__(source=source, precision="fp32", recompute="none", micro_batch=micro_batch)
        self.order = order
        self.confinement = confinement
        self.accumulation = min(order.plan.accumulation, MICRO_BATCHES)
        self.micro_batches = 0
        """Whose backward is over."""

    def engine(self, *parts: Any, client: Any) -> Engine:
        return _RehearsedEngine(self, *parts, client=client)

    def unfinished(self) -> str:
        return (
            f"enough steps: a rehearsal takes {2 * self.accumulation} micro-batches (two optimizer steps), the script made "
            f"{self.micro_batches}; let it make more"
        )


class _RehearsedEngine(Engine):
    """The engine itself, begun at the first forward under autograd. The script calls it; step() of the second step ends the script."""

    def __init__(self, rehearsing: _Rehearsing, model: nn.Module, *parts: Any, client: Any):
        self._order = rehearsing.order
        names = {id(param): name for name, param in model.named_parameters()}
        super().__init__(rehearsing, model, *parts)
        if isinstance(client, torch.optim.Optimizer):
            _hand_over(client, names, dict(model.named_parameters()))
        self._client = client
        self._rehearsing = rehearsing
        self._carrier: list[Any] = []  # in a list, so that the module's children stay the script's
        self._call = contextlib.ExitStack()
        self._between = contextlib.ExitStack()
        self._called = self._backed = False
        if self._order.plan.engine == "deepspeed":
            self.device = torch.device("cpu", 0)

    def __getattr__(self, name: str) -> Any:
        """What neither we nor the module have is the engine's own: its learning rates, its norm, its scale."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            carrier = self.__dict__.get("_carrier")
            if not carrier or name.startswith("_"):
                raise
            return getattr(carrier[0].engine, name)

    def _made_stand(self) -> Stand:
        """fp32, as a script makes its model; on the GPU that DeepSpeed is shown."""
        return fakes(self._mode, torch.float32, "cpu:0" if self._order.plan.engine == "deepspeed" else "cpu")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._carrier and not torch.is_grad_enabled():
            return self._evaluate(Inputs(args, kwargs))
        if not self._carrier:
            self._begin()
        elif self._backed and torch.is_grad_enabled():  # the script leaves step() out between the boundaries of its own
            self.step()
        self._resume()
        carrier = self._carrier[0]
        given = Inputs(args, kwargs)
        self._fed = self._fed or batch_of(given)
        resize = Resize(self._mode, batch_of(given), self._recording.micro_batch, str(self.device))
        if not torch.is_grad_enabled():
            with resize, carrier.on_device():
                output = resize.convert(given).feed(carrier.engine)
            self._suspend()
            return output
        self._recording.resize = resize
        carrier.forward_begins(inputs := resize.convert(given))
        self._call.enter_context(resize)
        self._call.enter_context(carrier.on_device())
        self._called = True
        return inputs.feed(carrier.engine)

    def backward(self, loss: torch.Tensor, *_: Any, **__: Any) -> None:
        check_backward(self._recording.source, loss, called=self._called)
        carrier = self._carrier[0]
        self._call.close()
        with self._at_ease():
            carrier.backward(loss)
        self._called, self._backed = False, True
        self._rehearsing.micro_batches += 1
        self._suspend()

    def step(self, *_: Any, **__: Any) -> None:
        if not self._backed:
            return
        self._backed = False
        self._resume()
        carrier, rehearsing = self._carrier[0], self._rehearsing
        with self._at_ease():
            carrier.step()
        self.micro_steps = rehearsing.micro_batches
        self.global_steps = rehearsing.micro_batches // rehearsing.accumulation
        if rehearsing.micro_batches == 2 * rehearsing.accumulation:
            with self._at_ease():
                told: Rehearsal = carrier.told(rehearsing.accumulation == self._order.plan.accumulation)
                self._open.close()
            raise Captured({"ledger": told.ledger.to_json(), "events": told.events, "resident": told.resident})
        if rehearsing.micro_batches == rehearsing.accumulation:
            carrier.second_step_begins()
        self._suspend()

    def is_gradient_accumulation_boundary(self) -> bool:
        return (self._rehearsing.micro_batches + (not self._backed)) % self._rehearsing.accumulation == 0

    def _begin(self) -> None:
        """Modes stay on the stack until the end; between the script's calls they are laid aside."""
        from dsplan.planner.rehearsing.script_carriers import carry_deepspeed, carry_native

        nn.Module.register_parameter = _register_parameter  # type: ignore[method-assign]
        if dist.is_initialized():
            dist.destroy_process_group()
        carry = carry_deepspeed if self._order.plan.engine == "deepspeed" else carry_native
        with self._at_ease():
            self._carrier.append(
                carry(
                    self._open,
                    self._mode,
                    self.module,
                    self._client,
                    self._optimizer_spec,
                    self._order,
                    self._rehearsing.accumulation,
                )
            )
        self._suspend()

    def _suspend(self) -> None:
        """Until the next call: no mode but one that answers what is asked of tensors without values."""
        self._between.enter_context(_disable_current_modes())
        self._between.enter_context(NormalValues())
        self._between.enter_context(_one_device())

    def _resume(self) -> None:
        self._between.close()

    @contextlib.contextmanager
    def _at_ease(self) -> Iterator[None]:
        """The engine's own work, which is not the script's to answer for: it may read and write."""
        with self._rehearsing.confinement.at_ease():
            yield


@contextlib.contextmanager
def _one_device() -> Iterator[None]:
    """The GPU that DeepSpeed is shown is `cpu:0`; to a script, which has no other, it is the cpu."""
    fakes_of: Any = FakeTensor
    original = fakes_of.device

    def device(tensor: FakeTensor) -> torch.device:
        found: torch.device = original.fget(tensor)
        return torch.device("cpu") if found.type == "cpu" else found

    fakes_of.device = property(device)
    try:
        yield
    finally:
        fakes_of.device = original


def _hand_over(client: torch.optim.Optimizer, names: dict[int, str], params: dict[str, nn.Parameter]) -> None:
    """The optimizer steps over the parameters that the model was lent, in place of those that it was made with."""
    for group in client.param_groups:
        group["params"] = [params[names[id(param)]] if id(param) in names else param for param in group["params"]]
