"""initialize(): DeepSpeed's signature and meaning; config, model and optimizer -> an Engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from dsplan.runtime.data import build_loader
from dsplan.runtime.engine import Engine, Parts
from dsplan.runtime.groups import data_parallel_mesh, init_distributed, local_rank, note, own_device
from dsplan.runtime.launching import progress
from dsplan.runtime.launching.orders import current_orders, keep_batch
from dsplan.runtime.measuring.attaching import attach, compile_options
from dsplan.runtime.measuring.meter import Meter
from dsplan.runtime.optimizing.building import Renaming, build_optimizer
from dsplan.runtime.optimizing.schedules import bound_schedule
from dsplan.runtime.recompute import apply_recompute
from dsplan.runtime.settling import settle_config
from dsplan.runtime.sharding.agreement import refuse_unequal_models
from dsplan.runtime.sharding.outputs import give_no_views
from dsplan.runtime.sharding.precision import precision_of
from dsplan.runtime.sharding.stages import shard
from dsplan.schemas.offloading import offloading
from dsplan.schemas.problem import Problem
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

meters: list[Meter] = []
"""Under a launch, the meter of the first engine: whether there is one tells whether the script made an engine."""


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[Engine, Any, Any, Any]:
    """(engine, optimizer, dataloader, lr_scheduler), as deepspeed.initialize gives them.

    The model is sharded in place: its parameters become DTensors. Problem with every reason at once where the config
    cannot be carried out.
    """
    if not isinstance(model, nn.Module):
        raise Problem(f"initialize needs a torch module as model, but got {type(model).__name__}")
    given = _held(model_parameters)
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    ds_config, batch = settle_config(
        config if config is not None else config_params,
        args,
        optimizer=optimizer,
        lr_scheduler=lr_scheduler,
    )
    if hasattr(args, "local_rank"):
        args.local_rank = local_rank()
    if mpu is not None or mesh_param is not None:
        raise Problem("mpu and mesh_param are not carried out by the native engine; leave them out")
    _refuse_sharded(model)
    refuse_unequal_models(model)
    _compare_with_plan(model)

    device = own_device()
    renaming = Renaming(model)
    activations = ds_config.raw.get("activation_checkpointing")
    on_host = isinstance(activations, dict) and activations.get("cpu_checkpointing") is True
    apply_recompute(model, ds_config.recompute, inputs_on_host=on_host)
    sharded = shard(
        model,
        zero_stage=ds_config.zero_stage,
        mesh=data_parallel_mesh(device),
        precision=precision_of(ds_config, model),
        offloading=offloading(ds_config.raw, ds_config.zero_stage),
    )
    give_no_views(sharded.units)
    # As in DeepSpeed, what no rank has used has a gradient of zeros: weight decay and momentum go on. What one rank has
    # used would else be reduced by that rank alone, which waits for the others.
    sharded.root.set_reduce_scatter_unused_params(True)
    _refuse_mixed_statistics(model, sharded.precision.compute, device)
    renaming.close(sharded.masters(), model)
    built = build_optimizer(ds_config.optimizer, optimizer, given, renaming)
    schedule = bound_schedule(lr_scheduler, built, ds_config.scheduler)
    loader = None
    if training_data is not None:
        drop_last = bool(ds_config.raw.get("dataloader_drop_last", False))
        loader = build_loader(
            training_data,
            batch.micro_batch,
            drop_last=drop_last,
            collate_fn=collate_fn,
            num_workers=ds_config.dataloader_workers,
            pin_memory=device.type == "cuda",
        )

    orders = current_orders()
    engine = Engine(
        Parts(
            sharded=sharded,
            optimizer=built,
            lr_scheduler=schedule,
            config=ds_config,
            batch=batch,
            device=device,
            strict=orders is not None and orders.strict,
        )
    )
    engine.training_dataloader = loader
    keep_batch(batch.global_batch, batch.micro_batch)
    progress.follow(engine)
    compiled = compile_options(ds_config.raw)
    if compiled is not None:
        engine.compile(compiled.get("backend", "inductor"), compiled)
    attach(engine, launched=orders is not None and not meters)
    if orders is not None and not meters and engine.meter is not None:
        meters.append(engine.meter)
    return engine, built, loader, schedule


def add_config_arguments(parser: Any) -> Any:
    """--deepspeed and --deepspeed_config, as DeepSpeed adds them."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", default=False, action="store_true")
    group.add_argument("--deepspeed_config", default=None, type=str)
    return parser


def _held(model_parameters: Any) -> list[Any] | None:
    """The parameters or groups, as they are now: a generator that is read later gives what has taken their place."""
    if model_parameters is None:
        return None
    return [
        {**entry, "params": entry["params"] if isinstance(entry["params"], torch.Tensor) else list(entry["params"])}
        if isinstance(entry, dict) and "params" in entry
        else entry
        for entry in ([model_parameters] if isinstance(model_parameters, (dict, torch.Tensor)) else model_parameters)
    ]


def _refuse_mixed_statistics(model: nn.Module, compute: torch.dtype, device: torch.device) -> None:
    """Problem where torch has no kernel: on the CPU weights and running statistics must have one type."""
    if device.type != "cpu":
        return
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.weight is not None and module.running_mean is not None:
            kept = module.running_mean.dtype
            if kept is not compute:
                short = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(compute, "fp32")
                raise Problem(
                    f"{name} ({type(module).__name__}) computes in {short}, but its running statistics are "
                    f"{str(kept).removeprefix('torch.')}, which torch does not take on CPUs; set data_types.buffer_dtype to {short}"
                )


def _compare_with_plan(model: nn.Module) -> None:
    """Under a plan: say so where it was made for another model. Problem under --strict."""
    orders = current_orders()
    held = sum(parameter.numel() for parameter in model.parameters())
    if orders is None or meters or orders.model_params in (None, held):
        return
    text = f"{orders.source} was made for a model of {orders.model_params:,} parameters, but this one has {held:,}"
    if orders.strict:
        raise Problem(f"{text}; tune this model, or leave out --strict")
    note(f"{text}: its predictions are not of this model")


def _refuse_sharded(model: nn.Module) -> None:
    if any(isinstance(module, (FSDPModule, Engine)) for module in model.modules()):
        raise Problem(
            f"this {type(model).__name__.removeprefix('FSDP')} is sharded already, by an earlier initialize or by FSDP; call initialize once, with "
            "the plain model"
        )
