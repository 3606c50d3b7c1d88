"""What DeepSpeed's engine answers when it is asked about itself, or told another batch or rate; nothing here trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from dsplan.runtime.data import Loader, build_loader
from dsplan.runtime.optimizing.loss_scale import LossScale
from dsplan.schemas.batch import Batch
from dsplan.schemas.config import DsConfig
from dsplan.schemas.problem import Problem
from torch.optim import Optimizer
from torch.utils.data import DistributedSampler

if TYPE_CHECKING:
    from dsplan.runtime.sharding.stages import Sharded


class Scale(float):
    """The loss scale in force. Called, as DeepSpeed's engine.loss_scale() is, it gives fp16.loss_scale: 0 if dynamic."""

    configured: float

    def __new__(cls, value: float, configured: float) -> Scale:
        scale = super().__new__(cls, value)
        scale.configured = configured
        return scale

    def __call__(self) -> float:
        return self.configured

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        """Pickled as the number that it is."""
        return float, (float(self),)


class Answers:
    """Mixed into Engine, which holds what is read here. Names and meanings: deepspeed/runtime/engine.py (0.19.8)."""

    optimizer: Optimizer | None
    lr_scheduler: Any
    device: torch.device
    world_size: int
    global_rank: int
    scaler: LossScale | None
    _sharded: Sharded
    _config: DsConfig
    _batch: Batch
    _norm: float | None
    _step_applied: bool

    # --- the batch ---

    def train_batch_size(self) -> int:
        return self._batch.global_batch

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._batch.micro_batch

    def gradient_accumulation_steps(self) -> int:
        return self._batch.accumulation

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Another global batch from here on, by more or fewer micro-batches of the same size."""
        at_once = self._batch.micro_batch * self.world_size
        if train_batch_size <= 0 or train_batch_size % at_once:
            raise Problem(
                f"train_batch_size {train_batch_size} is no multiple of micro-batch {self._batch.micro_batch} x dp "
                f"{self.world_size} = {at_once}"
            )
        self._batch = replace(self._batch, global_batch=train_batch_size, accumulation=train_batch_size // at_once)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Another micro-batch at the same accumulation, and so another global batch."""
        self._batch = replace(
            self._batch,
            micro_batch=micro_batch_size,
            global_batch=micro_batch_size * self._batch.accumulation * self.world_size,
        )

    def managed_gradient_accumulation(self) -> bool:
        return True

    def dataloader_drop_last(self) -> bool:
        return self._config.raw.get("dataloader_drop_last") is True

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Any = None,
        num_local_io_workers: int | None = None,
    ) -> Loader:
        """A loader of this rank's share: in an order of its own per epoch for route train, else in the data set's."""
        if data_sampler is None and route != "train":
            data_sampler = DistributedSampler(dataset, self.world_size, self.global_rank, shuffle=False)
        return build_loader(
            dataset,
            self._batch.micro_batch if batch_size is None else batch_size,
            drop_last=self.dataloader_drop_last(),
            collate_fn=collate_fn,
            num_workers=num_local_io_workers or 0,
            sampler=data_sampler,
            pin_memory=pin_memory and self.device.type == "cuda",
        )

    def get_batch_info(self) -> tuple[int, int, int]:
        """(global batch, micro-batch, accumulation)."""
        return self._batch.global_batch, self._batch.micro_batch, self._batch.accumulation

    # --- ZeRO ---

    def zero_optimization(self) -> bool:
        return self._sharded.zero_stage > 0

    def zero_optimization_stage(self) -> int:
        return self._sharded.zero_stage

    def zero_optimization_partition_gradients(self) -> bool:
        return self._sharded.zero_stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        return self._sharded.zero_stage >= 3

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """What the file says, since scripts ask it before they save. The engine gathers whatever it says."""
        zero = self._config.raw.get("zero_optimization")
        names = ("gather_16bit_weights_on_model_save", "stage3_gather_16bit_weights_on_model_save")
        return isinstance(zero, dict) and any(zero.get(name) is True for name in names)

    def zero_offload_optimizer(self) -> dict[str, Any] | None:
        return self._zero_block("offload_optimizer")

    def zero_offload_param(self) -> dict[str, Any] | None:
        return self._zero_block("offload_param")

    def zero_cpu_offload(self) -> bool:
        return (self.zero_offload_optimizer() or {}).get("device") == "cpu"

    def zero_allow_untested_optimizer(self) -> bool:
        return self._config.raw.get("zero_allow_untested_optimizer") is True

    def empty_partition_cache(self) -> None:
        """Free every gathered parameter."""
        self._sharded.drop_gathered()

    # --- precision ---

    def fp16_enabled(self) -> bool:
        return self._config.precision == "fp16"

    def bfloat16_enabled(self) -> bool:
        return self._config.precision == "bf16"

    def dynamic_loss_scale(self) -> bool:
        return self.scaler is not None and self.scaler.dynamic

    @property
    def loss_scale(self) -> Scale:
        if self.scaler is None:
            return Scale(1.0, 1.0)
        return Scale(self.scaler.value, self.scaler.rules.loss_scale)

    @property
    def cur_scale(self) -> float:
        return float(self.loss_scale)

    def torch_autocast_enabled(self) -> bool:
        return self._sharded.precision.autocast is not None

    def torch_autocast_dtype(self) -> torch.dtype | None:
        return self._sharded.precision.autocast

    @property
    def communication_data_type(self) -> torch.dtype:
        return self._sharded.precision.reduce

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """(of the model, in which gradients are summed over micro-batches)."""
        precision = self._sharded.precision
        return precision.compute, torch.float32 if self._sharded.zero_stage >= 2 else precision.reduce

    @property
    def compute_dtype(self) -> torch.dtype:
        return self._sharded.precision.compute

    # --- the step ---

    def gradient_clipping(self) -> float:
        return self._config.gradient_clipping

    def get_global_grad_norm(self) -> float | None:
        """Of the last step, before clipping and without the loss scale; not finite where it was skipped."""
        return self._norm

    def was_step_applied(self) -> bool:
        """Whether the last step() changed the weights: not between boundaries, nor where it was skipped."""
        return self._step_applied

    def set_lr(self, lr: float | Sequence[float]) -> None:
        """The learning rate of every group, or of each. A schedule that steps later has the last word."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        rates = [float(lr)] * len(groups) if isinstance(lr, (int, float)) else [float(rate) for rate in lr]
        if len(rates) != len(groups):
            raise Problem(f"set_lr was given {len(rates)} learning rates, but the optimizer has {len(groups)} groups")
        for group, rate in zip(groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def get_lr(self) -> list[float]:
        return self._of_groups("lr")

    def get_type(self) -> list[Any]:
        return self._of_groups("type")

    def get_mom(self) -> list[Any]:
        """Momentum of each group where the file names SGD or RMSprop, else its betas."""
        return self._of_groups("momentum" if self.optimizer_name() in ("SGD", "RMSprop") else "betas")

    def optimizer_name(self) -> str | None:
        return self._config.optimizer.type if self._config.optimizer is not None else None

    def scheduler_name(self) -> str | None:
        return self._config.scheduler.type if self._config.scheduler is not None else None

    def optimizer_params(self) -> dict[str, Any] | None:
        return dict(self._config.optimizer.params) if self._config.optimizer is not None else None

    def scheduler_params(self) -> dict[str, Any] | None:
        return dict(self._config.scheduler.params) if self._config.scheduler is not None else None

    def postscale_gradients(self) -> bool:
        return self._config.raw.get("prescale_gradients") is not True

    def gradient_predivide_factor(self) -> float:
        return float(self._config.raw.get("gradient_predivide_factor", 1.0))

    def steps_per_print(self) -> int | None:
        found = self._config.raw.get("steps_per_print")
        return found if isinstance(found, int) else None

    def memory_breakdown(self) -> bool:
        return self._config.raw.get("memory_breakdown") is True

    def dump_state(self) -> bool:
        return self._config.raw.get("dump_state") is True

    def wall_clock_breakdown(self) -> bool:
        return self._config.raw.get("wall_clock_breakdown") is True

    # --- the ranks ---

    @property
    def config(self) -> dict[str, Any]:
        return dict(self._config.raw)

    @property
    def dp_world_size(self) -> int:
        return self.world_size

    @property
    def mp_world_size(self) -> int:
        return 1

    @property
    def data_parallel_group(self) -> Any:
        return dist.group.WORLD

    def get_data_parallel_rank(self) -> int:
        return self.global_rank

    def get_sequence_parallel_group(self) -> None:
        return None

    def get_model_parallel_rank(self) -> int:
        return 0

    def get_tensor_parallel_rank(self) -> int:
        return 0

    def _zero_block(self, name: str) -> dict[str, Any] | None:
        zero = self._config.raw.get("zero_optimization")
        found = zero.get(name) if isinstance(zero, dict) else None
        return dict(found) if isinstance(found, dict) else None

    def _of_groups(self, option: str) -> list[Any]:
        return [] if self.optimizer is None else [group.get(option, 0.0) for group in self.optimizer.param_groups]
