"""What a script's `initialize` gives it during a capture: an engine that records one forward and backward, then stops."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from dsplan.planner.capturing.resizing import Resize
from dsplan.planner.models.weightless import DTYPES, Inputs, Stand, compute_dtype, fakes, lazy_names, lent_weights
from dsplan.planner.tracing.flops import forward_flops
from dsplan.planner.tracing.frozen_inputs import watching
from dsplan.planner.tracing.kernels import GpuKernels, NormalValues
from dsplan.planner.tracing.splitting import splitting
from dsplan.planner.tracing.timeline import Timeline
from dsplan.planner.tracing.tracer import assemble, sequence_length
from dsplan.runtime.recompute import apply_recompute
from dsplan.runtime.sharding.blocks import find_blocks
from dsplan.schemas.choices import OPTIMIZERS, Kernel, OptimizerSpec, optimizer_named
from dsplan.schemas.config import DsConfig, optimizer_spec, read_config
from dsplan.schemas.jsonfile import load_config_file
from dsplan.schemas.optimizer import DECAY_IN_GRADIENT
from dsplan.schemas.problem import Problem
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map


class Captured(BaseException):
    """Unwinds the script at its first backward. Not an Exception, so that no handler of the script stops it."""

    def __init__(self, answer: dict[str, Any]):
        super().__init__("captured")
        self.answer = answer


@dataclass
class Recording:
    """What is asked of this run (None: the script's own), and whether `initialize` was called."""

    source: str
    precision: str | None
    recompute: str | None
    micro_batch: int | None
    initialized: bool = False
    zero_init: bool = False
    """The model was made under zero.Init."""
    resize: Resize | None = None
    """Of the step that is being recorded."""

    def engine(self, *parts: Any, client: Any) -> Engine:
        """What `initialize` gives. client: the script's own optimizer object."""
        return Engine(self, *parts)

    def unfinished(self) -> str:
        """What the script ends without."""
        return "a call of engine.backward(); let it make at least one training step"


def init_distributed(*_: Any, **__: Any) -> None:
    """A process group of one rank in which nothing is sent."""
    if not dist.is_initialized():
        from torch.testing._internal.distributed.fake_pg import FakeStore

        original = dist.distributed_c10d.init_process_group
        original("fake", store=FakeStore(), rank=0, world_size=1)


def initialize(
    recording: Recording,
    args: Any = None,
    model: Any = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[Engine, Any, Any, Any]:
    """(engine, optimizer, dataloader, lr_scheduler), as deepspeed.initialize gives them."""
    recording.initialized = True
    if not isinstance(model, nn.Module):
        raise Problem(
            f"{recording.source}: initialize() was given {type(model).__name__} as model, but needs a torch.nn.Module"
        )
    lazy = lazy_names(model)
    if lazy:
        raise Problem(
            f"{recording.source}: initialize() was given a model with lazy parameters, whose sizes are not known: "
            f"{', '.join(lazy)}; run a batch through it before, or give the sizes"
        )
    if next(model.parameters(), None) is None:
        raise Problem(f"{recording.source}: initialize() was given a {type(model).__name__} without parameters")
    init_distributed()
    raw = _config(config if config is not None else config_params, args)
    ds_config = read_config(raw, f"{recording.source} (its configuration)")
    if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(list(model_parameters) if model_parameters is not None else model.parameters())
    spec, notes = _optimizer(optimizer, ds_config)
    engine = recording.engine(model, raw, ds_config, spec, notes, client=optimizer)
    client = optimizer if optimizer is not None else _stub_optimizer(model)
    scheduler = lr_scheduler(client) if callable(lr_scheduler) and not hasattr(lr_scheduler, "step") else lr_scheduler
    engine.optimizer, engine.lr_scheduler = client, scheduler
    loader = None
    if training_data is not None:
        loader = torch.utils.data.DataLoader(
            training_data, batch_size=engine.train_micro_batch_size_per_gpu(), collate_fn=collate_fn
        )
    engine.training_dataloader = loader
    return engine, client, loader, scheduler


def _config(config: Any, args: Any) -> dict[str, Any]:
    if config is None:
        config = getattr(args, "deepspeed_config", None)
    if config is None:
        raise Problem("the script calls initialize() without a configuration; pass config= or --deepspeed_config")
    if isinstance(config, (str, Path)):
        return load_config_file(config)
    if not isinstance(config, Mapping):
        raise Problem(
            f"the script gives initialize() a {type(config).__name__} as config, but it must be a path or a dict"
        )
    return dict(config)


def _optimizer(optimizer: Any, config: DsConfig) -> tuple[OptimizerSpec | None, list[str]]:
    if optimizer is None:
        return optimizer_spec(config), []
    names = [kind.__name__.lower() for kind in type(optimizer).__mro__]
    known = next((spec for spec in map(optimizer_named, names) if spec is not None), None)
    if known is None:
        return None, [f"the optimizer {type(optimizer).__name__} is not known; its states count as AdamW's"]
    group = optimizer.param_groups[0]
    kernel: Kernel = "foreach"  # torch's choice on a GPU where nothing is said
    if group.get("fused") or (names[0] not in OPTIMIZERS and optimizer_named(names[0])):
        kernel = "fused"
    elif group.get("foreach") is False:
        kernel = "for-loop"
    return replace(
        known,
        momentum=bool(group.get("momentum")),
        kernel=kernel,
        weight_decay=known.name in DECAY_IN_GRADIENT and bool(group.get("weight_decay")),
        amsgrad=group.get("amsgrad") is True,
    ), []


def _stub_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [param for param in model.parameters() if param.requires_grad] or [nn.Parameter(torch.zeros(1))], lr=1e-3
    )


class Engine(nn.Module):
    """Records from its first call under autograd on. backward() ends the script."""

    def __init__(
        self,
        recording: Recording,
        model: nn.Module,
        raw: dict[str, Any],
        config: DsConfig,
        spec: OptimizerSpec | None,
        notes: list[str],
    ):
        super().__init__()
        self.module = model
        self.config = raw
        self.optimizer: Any = None
        self.lr_scheduler: Any = None
        self.training_dataloader: Any = None
        self.global_rank, self.local_rank, self.world_size = 0, 0, 1
        self.device = torch.device("cpu")
        self.global_steps = self.micro_steps = 0
        self._recording = recording
        self._ds_config = config
        self._optimizer_spec = spec
        self._notes = notes
        self._precision = recording.precision or config.precision
        self._recompute = recording.recompute or config.recompute
        self._dtype = DTYPES[self._precision]
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._stand = self._made_stand()
        self._blocks = find_blocks(model)
        self._rules = splitting(model, self._blocks)
        self._open = contextlib.ExitStack()
        self._timeline: Timeline | None = None
        self._inputs: Inputs | None = None
        self._fed: int | None = None
        self._open.enter_context(lent_weights(model, self._stand))

    def _made_stand(self) -> Stand:
        return fakes(self._mode, self._dtype)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = Inputs(args, kwargs)
        if self._timeline is None and not torch.is_grad_enabled():
            return self._evaluate(given)
        if self._timeline is None:
            self._fed = batch_of(given)
            resize = self._recording.resize = Resize(self._mode, self._fed, self._recording.micro_batch)
            inputs = resize.convert(given)
            cast = tree_map(lambda leaf: self._cast(leaf), inputs)
            self._inputs = cast
            self._timeline = Timeline(self.module, [block for _, block in self._blocks], self._rules.roles)
            apply_recompute(self.module, self._recompute)  # type: ignore[arg-type]
            for context in (resize, self._mode, GpuKernels(), watching(self.module, self._timeline), self._timeline):
                self._open.enter_context(context)
            self._timeline.start(cast.tensors)
            resize.timeline = self._timeline
        else:
            cast = tree_map(lambda leaf: self._cast(leaf), given)
        output = cast.feed(self.module)
        return output

    def _evaluate(self, given: Inputs) -> Any:
        """A forward before training: zeros of the right shapes come out, as real tensors of one element."""

        def hollow(leaf: Any) -> Any:
            return torch.zeros((), dtype=leaf.dtype).expand(leaf.shape) if isinstance(leaf, FakeTensor) else leaf

        resize = Resize(self._mode, None, None)
        values = NormalValues()
        with resize, self._mode, GpuKernels(), values:
            output = tree_map(self._cast, resize.convert(given)).feed(self.module)
        return tree_map(hollow, output)

    def _cast(self, leaf: Any) -> Any:
        """Floats in the compute dtype; as they arrive, so that what is cast costs nothing."""
        if not isinstance(leaf, torch.Tensor) or compute_dtype(leaf, self._dtype) == leaf.dtype:
            return leaf
        return self._stand(leaf) if isinstance(leaf, FakeTensor) and leaf.grad_fn is None else leaf.to(self._dtype)

    def backward(self, loss: torch.Tensor, *_: Any, **__: Any) -> None:
        source = self._recording.source
        check_backward(source, loss, called=self._timeline is not None)
        assert self._timeline is not None and self._inputs is not None
        self._timeline.run_backward(loss)
        segments, events = self._timeline.segments(), self._timeline.events()
        self._open.close()
        flops = forward_flops(self.module, self._blocks, self._inputs)
        micro_batch = self._recording.micro_batch or self._fed
        trace = assemble(
            source,
            self.module,
            self._blocks,
            self._rules,
            flops,
            segments,
            self._precision,
            self._recompute,
            micro_batch,
            sequence_length(self._inputs),
            [*self._notes, *self._rules.notes, *flops.notes, *self._timeline.assumptions],
        )
        raise Captured(
            {
                "trace": replace(trace, events=events).to_json(),
                "config": _plain(self.config),
                "optimizer": asdict(self._optimizer_spec) if self._optimizer_spec else None,
                "micro_batch": self._fed,
            }
        )

    def step(self, *_: Any, **__: Any) -> None:
        raise Problem(f"{self._recording.source}: engine.step() comes before the first engine.backward(loss)")

    def gradient_accumulation_steps(self) -> int:
        return self._ds_config.accumulation if isinstance(self._ds_config.accumulation, int) else 1

    def train_micro_batch_size_per_gpu(self) -> int:
        if isinstance(self._ds_config.micro_batch, int):
            return self._ds_config.micro_batch
        whole = self._ds_config.train_batch_size
        return whole // self.gradient_accumulation_steps() if isinstance(whole, int) else 1

    def train_batch_size(self) -> int:
        return self.train_micro_batch_size_per_gpu() * self.gradient_accumulation_steps()

    def is_gradient_accumulation_boundary(self) -> bool:
        return self.gradient_accumulation_steps() == 1

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        pass

    def zero_optimization_stage(self) -> int:
        return self._ds_config.zero_stage

    def fp16_enabled(self) -> bool:
        return self._ds_config.precision == "fp16"

    def bfloat16_enabled(self) -> bool:
        return self._ds_config.precision == "bf16"

    def load_checkpoint(self, *_: Any, **__: Any) -> tuple[None, dict[str, Any]]:
        return None, {}

    def save_checkpoint(self, *_: Any, **__: Any) -> None:
        pass

    def zero_grad(self, set_to_none: bool = True) -> None:
        pass


def check_backward(source: str, loss: Any, *, called: bool) -> None:
    """Problem for a backward that no engine runs. called: the engine was, before."""
    if not called:
        raise Problem(f"{source}: engine.backward() comes before the engine was called; call engine(inputs) first")
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise Problem(
            f"{source}: engine.backward() was given {_shape(loss)}, but needs a scalar loss that depends on the model"
        )


def batch_of(inputs: Inputs) -> int | None:
    return next((int(tensor.shape[0]) for tensor in inputs.tensors if tensor.dim() > 0), None)


def _shape(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def _plain(value: Any) -> Any:
    """The config as JSON can hold it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(member) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(member) for member in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
