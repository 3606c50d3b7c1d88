"""Trainings that real DeepSpeed was asked about (tests/oracle/training_traces.py) and that the engine repeats."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

WIDTH, WORDS, LENGTH, SAMPLES, STEPS = 24, 29, 6, 8, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, 2 * WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        y = y.cumsum(1) / self.steps(y)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))

    def steps(self, y: torch.Tensor) -> torch.Tensor:
        return torch.arange(1, y.shape[1] + 1, dtype=y.dtype, device=y.device)[:, None]


class Net(nn.Module):
    """tokens [batch, LENGTH] -> logits over the next one. Each place sees the mean of those before it."""

    def __init__(self, *, tied: bool = False, sparse: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, sparse=sparse)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight
        self.register_buffer("places", torch.linspace(0, 0.3, LENGTH)[:, None])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        x = x + self.places.to(x.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(net: dict[str, Any], dtype: str = "float32") -> Net:
    torch.manual_seed(7)
    model = Net(**net)
    for name, parameter in sorted(model.named_parameters()):
        generator = torch.Generator().manual_seed(len(name) * parameter.numel())
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.15, generator=generator)
    return model.to(getattr(torch, dtype)) if dtype != "float32" else model


def tokens_of(step: int) -> torch.Tensor:
    """A global batch: each word follows from the one before it, but for a little noise. Four batches take turns."""
    generator = torch.Generator().manual_seed(100 + step % 4)
    rows = [torch.randint(WORDS, (SAMPLES,), generator=generator)]
    for _ in range(LENGTH):
        rows.append((3 * rows[-1] + 5 + torch.randint(2, (SAMPLES,), generator=generator)) % WORDS)
    return torch.stack(rows, 1)


def loss_of(logits: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), following.flatten())


ADAMW = {"type": "AdamW", "params": {"lr": 4e-3, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True}}
SLOW = {"type": "AdamW", "params": {**ADAMW["params"], "lr": 1e-5}}
"""So slow that steps at which the fp16 scale grows, which DeepSpeed takes wrongly, do not show in what follows."""
SGD = {"type": "SGD", "params": {"lr": 0.3, "momentum": 0.5}}
MUON = {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 4e-3, "weight_decay": 0.1, "ns_method": "standard"}}
FP16 = {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 50, "hysteresis": 2, "min_loss_scale": 1}
BF16 = {"enabled": True}
WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 4e-3, "warmup_num_steps": 4}}


def case(
    stage: int, precision: dict[str, Any] | None = None, *, clip: float = 0.0, accumulation: int = 1, **more: Any
) -> dict[str, Any]:
    """Of more, `net` and `dtype` say which model; the rest is laid over the config."""
    net, dtype = more.pop("net", {}), more.pop("dtype", "float32")
    config = {
        "train_batch_size": SAMPLES,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "optimizer": ADAMW,
        **(precision or {}),
        **more,
    }
    return {"config": copy.deepcopy(config), "net": net, "dtype": dtype}


def fp16(**changes: Any) -> dict[str, Any]:
    return {"fp16": {**FP16, **changes}}


CASES: dict[str, dict[str, Any]] = {
    **{f"fp32_z{z}": case(z) for z in (0, 1, 2, 3)},
    **{f"fp32_z{z}_clip_accumulated": case(z, clip=0.5, accumulation=2) for z in (0, 1, 2, 3)},
    **{f"bf16_z{z}": case(z, {"bf16": BF16}) for z in (1, 2, 3)},
    **{f"bf16_z{z}_clip_accumulated": case(z, {"bf16": BF16}, clip=0.5, accumulation=2) for z in (1, 2, 3)},
    **{f"fp16_z{z}": case(z, fp16()) for z in (1, 2, 3)},
    **{f"fp16_z{z}_clip_accumulated": case(z, fp16(), clip=0.5, accumulation=2) for z in (1, 2, 3)},
    **{f"fp16_z{z}_overflowing": case(z, fp16(initial_scale_power=19, loss_scale_window=2, hysteresis=1), optimizer=SLOW) for z in (1, 2, 3)},
    "fp16_z2_hysteresis": case(2, fp16(initial_scale_power=18, loss_scale_window=1, hysteresis=2), optimizer=SLOW),
    "fp16_z2_consecutive": case(2, fp16(initial_scale_power=18, loss_scale_window=1, hysteresis=2, consecutive_hysteresis=True), optimizer=SLOW),
    "fp16_z1_least_scale": case(1, fp16(initial_scale_power=18, hysteresis=1, min_loss_scale=70_000)),
    "fp16_z2_static": case(2, {"fp16": {"enabled": True, "loss_scale": 256}}),
    "fp16_z2_schedule": case(2, fp16(initial_scale_power=18, hysteresis=1), scheduler=WARMUP),
    "fp16_z2_growing": case(2, fp16(loss_scale_window=2)),
    "fp16_z0_static": case(0, {"fp16": {"enabled": True, "loss_scale": 256}}, optimizer=SGD),
    "fp16_z1_static_sgd": case(1, {"fp16": {"enabled": True, "loss_scale": 256}}, optimizer=SGD),
    "bf16_z0": case(0, {"bf16": BF16}),
    "autocast_z0": case(0, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}),
    "autocast_z2": case(2, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, accumulation=2),
    "bf16_z1_low_masters": case(1, {"bf16": {**BF16, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}),
    "bf16_z2_low_masters": case(2, {"bf16": {**BF16, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}),
    "bf16_z1_adds_in_fp32": case(1, {"bf16": BF16}, accumulation=2, data_types={"grad_accum_dtype": "fp32"}),
    "bf16_z2_sent_in_fp32": case(2, {"bf16": BF16}, communication_data_type="fp32"),
    "bf16_z2_fp32_buffers": case(2, {"bf16": BF16}, data_types={"buffer_dtype": "bf16", "keep_in_fp32_modules": ["places"]}),
    "prescaled_z0": case(0, prescale_gradients=True),
    "predivided_z0": case(0, gradient_predivide_factor=2.0),
    "tied_z2": case(2, net={"tied": True}),
    "sparse_z0": case(0, net={"sparse": True}, optimizer=SGD, accumulation=2),
    "sparse_z0_clip": case(0, net={"sparse": True}, optimizer=SGD, clip=0.5),
    "half_model_z1": case(1, dtype="bfloat16"),
    "half_model_z2": case(2, dtype="bfloat16"),
    "sgd_z3": case(3, optimizer=SGD),
    **{f"muon_z{z}_clip": case(z, clip=2.0, optimizer=MUON) for z in (0, 1, 2)},
    "muon_z2_bf16": case(2, {"bf16": BF16}, optimizer=MUON),
    "schedule_z1": case(1, scheduler=WARMUP),
}  # fmt: skip


def train(initialize: Callable[..., Any], asked: dict[str, Any]) -> dict[str, list[float]]:
    """What each of STEPS steps told: loss (mean over ranks), norm (0 where there is none), lr, scale, skipped so far."""
    rank, world = dist.get_rank(), dist.get_world_size()
    config = copy.deepcopy(asked["config"])
    model = build(asked["net"], asked["dtype"])
    engine, _, _, _ = initialize(model=model, model_parameters=model.parameters(), config=config)
    told: dict[str, list[float]] = {"loss": [], "norm": [], "lr": [], "scale": [], "skipped": []}
    share = SAMPLES // world
    for step in range(STEPS):
        mine = tokens_of(step)[rank * share : (rank + 1) * share]
        total = torch.zeros((), dtype=torch.float64)
        for part in mine.split(share // config["gradient_accumulation_steps"]):
            loss = loss_of(engine(part[:, :-1]), part[:, 1:])
            total += loss.detach().double() / config["gradient_accumulation_steps"] / world
            engine.backward(loss)
            engine.step()
        dist.all_reduce(total)
        told["loss"].append(total.item())
        told["norm"].append(float(engine.get_global_grad_norm() or 0.0))
        told["lr"].append(float(engine.get_lr()[0]))
        told["scale"].append(float(getattr(engine.optimizer, "loss_scale", 1.0)))
        told["skipped"].append(engine.skipped_steps)
    return told
