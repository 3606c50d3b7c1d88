"""One small training that real DeepSpeed and the native engine both run, so that one can go on where the other stopped.

Imports neither of the two. Sizes are odd, so that flat buffers and shards are padded on two and on three ranks.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

WIDTH, VOCAB, GLOBAL_BATCH = 5, 7, 6
SAVED_AT, STOP = 3, 7
CLIENT_STATE = {"epoch": 2, "note": "half way"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.down = nn.Linear(2 * WIDTH + 1, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Small(nn.Module):
    """tokens [batch, 3] -> logits. Head tied to the embedding, one layer frozen, buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.fixed = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("offset", torch.randn(WIDTH))
        self.register_buffer("counted", torch.tensor([3, 4]))
        self.register_buffer("cache", torch.ones(WIDTH), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        x = x + self.offset.to(x.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(self.fixed(x))


@dataclass(frozen=True)
class Case:
    name: str
    zero_stage: int
    precision: str = "fp32"
    ranks: int = 2
    optimizer: str = "AdamW"  # or: SGD (the client's, with momentum), none, FusedAdam, CPUAdam
    groups: bool = False
    frozen_given: bool = False
    """The optimizer is given the frozen parameters too."""
    schedule: bool = True
    zero: tuple[tuple[str, Any], ...] = ()
    fp16: tuple[tuple[str, Any], ...] = ()

    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": GLOBAL_BATCH // self.ranks,
            "gradient_clipping": 0.5,
            "zero_optimization": {"stage": self.zero_stage, **dict(self.zero)},
            "zero_allow_untested_optimizer": True,
        }
        if self.precision != "fp32":
            config[self.precision] = {"enabled": True, **dict(self.fp16)}
        if self.optimizer in ("AdamW", "FusedAdam", "CPUAdam"):
            params = {"lr": 0.02, "weight_decay": 0.1}
            config["optimizer"] = {"type": "AdamW", "params": params}
            if self.optimizer == "AdamW":
                params["torch_adam"] = True
        if self.optimizer == "CPUAdam":
            config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        if self.schedule and self.optimizer != "none":
            params = {"warmup_max_lr": 0.02, "warmup_num_steps": 5, "warmup_type": "linear"}
            config["scheduler"] = {"type": "WarmupLR", "params": params}
        return config


CASES = [
    *(Case(f"z{stage}_{precision}", stage, precision) for stage in (1, 2, 3) for precision in ("fp32", "bf16")),
    Case("z0_fp32", 0),
    Case("z0_fp32_groups", 0, groups=True),
    Case("z0_bf16_groups", 0, "bf16", groups=True),
    *(
        Case(
            f"z{stage}_fp16",
            stage,
            "fp16",
            fp16=(("initial_scale_power", 18), ("loss_scale_window", 3), ("hysteresis", 1)),
        )
        for stage in (0, 1, 2, 3)
    ),
    Case("z2_fp16_static", 2, "fp16", fp16=(("loss_scale", 128),)),
    Case("z1_three_ranks", 1, ranks=3, groups=True),
    Case("z2_one_rank", 2, ranks=1, groups=True),
    Case("z3_three_ranks", 3, ranks=3, groups=True, zero=(("sub_group_size", 120),)),
    Case("z2_groups_round_robin", 2, "bf16", groups=True, zero=(("round_robin_gradients", True),)),
    Case("z0_frozen_given", 0, groups=True, frozen_given=True),
    Case("z1_frozen_given", 1, "bf16", groups=True, frozen_given=True),
    Case("z3_frozen_given", 3, optimizer="SGD", groups=True, frozen_given=True),
    Case("z2_sgd", 2, optimizer="SGD"),
    Case("z3_sgd_three_ranks", 3, ranks=3, optimizer="SGD", schedule=False),
    Case("z0_sgd_groups", 0, optimizer="SGD", groups=True),
    Case("z0_none", 0, optimizer="none"),
    Case("z0_fused_bf16", 0, "bf16", optimizer="FusedAdam", groups=True),
    Case("z2_fused", 2, optimizer="FusedAdam", groups=True),
    Case("z2_offload", 2, "bf16", optimizer="CPUAdam", groups=True),
    Case("z3_offload", 3, optimizer="CPUAdam"),
]
"""What DeepSpeed is asked to write, by name."""


def digest(tensor: torch.Tensor) -> str:
    """Of the numbers, as fp32: equal where every bit is."""
    return hashlib.sha256(bytes(tensor.detach().float().flatten().contiguous().view(torch.uint8).tolist())).hexdigest()[
        :16
    ]


def batches(start: int, stop: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(VOCAB, (GLOBAL_BATCH, 3), generator=generator) for _ in range(stop)][start:]


def build(case: Case, seed: int) -> tuple[nn.Module, dict[str, Any]]:
    """(model, what initialize gets beside the config)."""
    torch.manual_seed(seed)
    model = Small()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad or case.frozen_given]
    parameters: list[Any] = trained
    if case.groups:
        parameters = [
            {"params": [parameter for parameter in trained if parameter.dim() == 1], "weight_decay": 0.0},
            {"params": [parameter for parameter in trained if parameter.dim() > 1]},
        ]
    if case.optimizer == "SGD":
        return model, {"optimizer": torch.optim.SGD(parameters, lr=0.1, momentum=0.9)}
    return model, {"model_parameters": parameters} if case.optimizer != "none" else {}


def run(engine: Any, start: int, stop: int, trains: bool = True) -> list[float]:
    """The mean loss over all samples at each step; each rank is fed its own equal share of the batch."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    losses = []
    for tokens in batches(start, stop):
        part = tokens.chunk(ranks)[rank]
        logits = engine(part)
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), (part * 3 % VOCAB).flatten())
        if trains:
            engine.backward(loss)
            engine.step()
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() / ranks)
    return losses
