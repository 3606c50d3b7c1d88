"""initialize(): DeepSpeed's signature and meaning; config, model and optimizer -> an Engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from dsplan.runtime.data import build_loader
from dsplan.runtime.engine import Engine, Parts
from dsplan.runtime.groups import data_parallel_mesh, init_distributed, note, own_device
from dsplan.runtime.launching.orders import current_orders, lay_over
from dsplan.runtime.measuring.meter import Meter
from dsplan.runtime.optimizing.building import Renaming, build_optimizer
from dsplan.runtime.optimizing.schedules import bound_schedule
from dsplan.runtime.recompute import apply_recompute
from dsplan.runtime.refusals import REDUCE_TYPES, judge_whole
from dsplan.runtime.sharding.agreement import refuse_unequal_models
from dsplan.runtime.sharding.stages import shard
from dsplan.schemas.config import Batch, DsConfig
from dsplan.schemas.jsonfile import load_config_file
from dsplan.schemas.problem import Problem
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
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
    given = list(model_parameters) if model_parameters is not None else None  # a generator ends with the old parameters
    init_distributed()
    ds_config, batch = _settle_config(
        config if config is not None else config_params,
        args,
        has_optimizer=optimizer is not None,
        has_scheduler=lr_scheduler is not None,
    )
    if mpu is not None or mesh_param is not None:
        raise Problem("mpu and mesh_param are not carried out by the native engine; leave them out")
    _refuse_sharded(model)
    _refuse_sparse_gradients(model)
    refuse_unequal_models(model)

    device = own_device()
    compute_dtype = DTYPES[ds_config.precision]
    renaming = Renaming(model)
    apply_recompute(model, ds_config.recompute)
    sharded = shard(
        model,
        zero_stage=ds_config.zero_stage,
        mesh=data_parallel_mesh(device),
        compute_dtype=compute_dtype,
        reduce_dtype=_reduce_dtype(ds_config.raw, compute_dtype),
    )
    renaming.close(sharded.masters())
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
    if orders is not None and not meters:
        meters.append(Meter(engine))
        engine.observers.append(meters[0])
    return engine, built, loader, schedule


def add_config_arguments(parser: Any) -> Any:
    """--deepspeed and --deepspeed_config, as DeepSpeed adds them."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", default=False, action="store_true")
    group.add_argument("--deepspeed_config", default=None, type=str)
    return parser


def _refuse_sharded(model: nn.Module) -> None:
    if any(isinstance(module, (FSDPModule, Engine)) for module in model.modules()):
        raise Problem(
            f"this {type(model).__name__.removeprefix('FSDP')} is sharded already, by an earlier initialize or by FSDP; call initialize once, with "
            "the plain model"
        )


def _refuse_sparse_gradients(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise Problem(
                f"{name} is an embedding with sparse=True, whose gradients FSDP2 cannot reduce; build it with sparse=False"
            )


def _settle_config(given: Any, args: Any, *, has_optimizer: bool, has_scheduler: bool) -> tuple[DsConfig, Batch]:
    """The script's config under the launch's orders, every value checked and the batch equation solved."""
    if given is None:
        given = getattr(args, "deepspeed_config", None)
    orders = current_orders()
    ordered = orders.config if orders is not None else None
    if given is None and ordered is None:
        raise Problem("initialize needs a config: pass config= (a path or a dict), or args with deepspeed_config")
    raw, source = _read(given) if given is not None else ({}, "config")
    changes: list[str] = []
    if orders is not None and ordered is not None:
        raw, changes = lay_over(raw, ordered)
        source = orders.source
    verdict, batch = judge_whole(
        raw, source, dp=dist.get_world_size(), has_optimizer=has_optimizer, has_scheduler=has_scheduler
    )
    for change in changes if given is not None else ():
        key = change.split(" ")[0]
        if not any(key == name or key.startswith(f"{name}.") for name in verdict.without_effect):
            note(f"{source} over the script's config: {change}")
    for warning in verdict.warnings:
        note(f"{source}: {warning}")
    return verdict.accepted(), batch


def _read(given: Any) -> tuple[dict[str, Any], str]:
    if isinstance(given, Mapping):
        return dict(given), "config"
    if not isinstance(given, (str, Path)):
        raise Problem(f"config is {type(given).__name__}, but must be a path or a dict")
    return load_config_file(given), str(given)


def _reduce_dtype(raw: Mapping[str, Any], compute_dtype: torch.dtype) -> torch.dtype | None:
    """None: the compute dtype. communication_data_type names another."""
    wanted = raw.get("communication_data_type")
    if not isinstance(wanted, str) or wanted == "auto":
        return None
    dtype = DTYPES[REDUCE_TYPES[wanted.lower()]]
    return None if dtype is compute_dtype else dtype
