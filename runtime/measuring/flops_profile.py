"""flops_profiler: the FLOPs of one step as they are carried out, by module, and how fast the device was."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from dsplan.reports.flops_table import ModuleFlops, Profile, as_text, rates_text
from dsplan.runtime.groups import note
from dsplan.runtime.measuring.observing import Observer
from dsplan.schemas.cluster import gpu_of
from dsplan.schemas.problem import Problem
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

if TYPE_CHECKING:
    from dsplan.runtime.engine import Engine


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))  # type: ignore[no-untyped-call]


ON_CPU = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
"""Attention as the host carries it out, which torch's counter does not know; counted as on a GPU."""

PROFILE_STEP, TOP_MODULES = 1, 1
"""Source: deepspeed/profiling/constants.py (0.19.8)."""


class FlopsProfile(Observer):
    """Counts products at one step, forward and backward with what is computed again; on every rank, and rank 0 tells.

    Rates are told after the next step that neither this nor the meter slows down. Compiled blocks run uncompiled while
    they are counted.
    """

    def __init__(self, engine: Engine, block: Mapping[str, Any]):
        self._engine = engine
        self._at = block.get("profile_step", PROFILE_STEP)
        self._depth = block.get("module_depth", -1)
        self._top = block.get("top_modules", TOP_MODULES)
        self._detailed = block.get("detailed", True)
        self._file = block.get("output_file") or None
        self._counter: FlopCounterMode | None = None
        self._forward: Counter[str] = Counter()
        self._both = 0
        self._micro_batches = 0
        self._began = 0.0
        self._profile: Profile | None = None

    def forward_begins(self, inputs: list[torch.Tensor]) -> None:
        if not self._micro_batches:
            self._began = time.perf_counter()
        self._micro_batches += 1
        if self._engine.global_steps == self._at:
            self._counter = FlopCounterMode(display=False, custom_mapping=ON_CPU)
            self._counter.__enter__()  # type: ignore[no-untyped-call]

    def backward_begins(self) -> None:
        if self._counter is not None:
            self._forward.update(_by_module(self._counter))

    def backward_ends(self, loss: torch.Tensor) -> None:
        if self._counter is not None:
            self._counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._both += self._counter.get_total_flops()
            self._counter = None

    def step_ends(self) -> None:
        engine = self._engine
        if engine.global_steps == self._at + 1:
            self._profile = self._counted()
            self._tell(self._profile, as_text(self._profile, depth=self._depth, top=self._top, detailed=self._detailed))
        elif self._profile is not None and not (engine.meter and engine.meter.watched_step == engine.global_steps):
            if engine.device.type == "cuda":
                torch.cuda.synchronize()
            timed = replace(self._profile, step_seconds=time.perf_counter() - self._began)
            self._tell(timed, rates_text(timed))
            self._profile = None
        self._micro_batches = 0

    def _counted(self) -> Profile:
        engine = self._engine
        return Profile(
            step=self._at + 1,
            micro_batches=self._micro_batches,
            params=sum(parameter.numel() for parameter in engine.module.parameters()),
            forward_flops=self._forward["Global"],
            step_flops=self._both,
            step_seconds=None,
            global_batch=engine.train_batch_size(),
            device_flops_per_second=_peak_flops_per_second(engine),
            modules=tuple(self._modules()),
        )

    def _tell(self, profile: Profile, text: str) -> None:
        """On rank 0, to people or to output_file, where what is told later is added."""
        if self._engine.global_rank:
            return
        if self._file is None:
            note(text)
            return
        try:
            Path(self._file).parent.mkdir(parents=True, exist_ok=True)
            with Path(self._file).open("w" if profile.step_seconds is None else "a", encoding="utf-8") as file:
                file.write(text + "\n")
        except OSError as error:
            raise Problem(
                f"flops_profiler.output_file: cannot write {self._file}: {error.strerror}; name another file"
            ) from error

    def _modules(self) -> list[ModuleFlops]:
        """Each module's forward, by its path in the model. Of backward the whole alone is told: what is computed again in it
        runs under other modules' names."""
        return [
            ModuleFlops(
                name=name,
                kind=type(module).__name__.removeprefix("FSDP"),
                params=sum(parameter.numel() for parameter in module.parameters()),
                forward_flops=self._flops(name, module),
            )
            for name, module in self._engine.module.named_modules()
        ]

    def _flops(self, name: str, module: nn.Module) -> int:
        """Of a list of modules, which is never called, those of its members."""
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            return sum(self._flops(f"{name}.{member}", inner) for member, inner in module.named_children())
        whole = type(self._engine.module).__name__
        return self._forward[f"{whole}.{name}" if name else whole]


def _by_module(counter: FlopCounterMode) -> Counter[str]:
    """ "Global" is the whole."""
    counts: Mapping[str, Mapping[Any, int]] = counter.get_flop_counts()
    return Counter({name: sum(of.values()) for name, of in counts.items()})


def _peak_flops_per_second(engine: Engine) -> float | None:
    """Of this rank's GPU in the compute dtype; None where it is not known."""
    if engine.device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(engine.device)
    gpu = gpu_of(properties.name, properties.total_memory)
    precision = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[engine.compute_dtype]
    return None if gpu is None else gpu.flops_per_second.get(precision)
