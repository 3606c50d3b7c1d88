"""What bitsandbytes offers a training script: layers whose weights are quantised, optimizers with 8-bit states.

A weight is quantised as soon as it is made; its scales are buffers. Source: bitsandbytes/nn/modules.py,
bitsandbytes/autograd/_functions.py, bitsandbytes/optim/*.py of 0.50.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.nn.functional as F
from dsplan.planner.capturing.standing import functions
from dsplan.planner.capturing.standing.calls import called
from torch import nn

_PACKAGE = "bitsandbytes"
BLOCK_4BIT = 64
"""Weights that share a scale."""
BLOCK_SCALES = 256
"""Scales that share a scale of their own, where they are compressed to a byte each."""


class Params4bit(nn.Parameter):
    """Two weights a byte, frozen."""


class Int8Params(nn.Parameter):
    """A byte a weight, frozen."""


class Linear4bit(nn.Linear):
    """Two weights a byte, and an fp32 scale, or with compress_statistics a byte, per 64 of them.

    Backward gives no gradient to the weight; the whole weight is made in the compute dtype each time it is needed.
    """

    def __init__(
        self, input_features: int, output_features: int, bias: bool = True, compute_dtype: torch.dtype | None = None,
        compress_statistics: bool = True, quant_type: str = "fp4", quant_storage: torch.dtype = torch.uint8, device: Any = None,
    ):  # fmt: skip
        super().__init__(input_features, output_features, bias, device="meta")
        called(_PACKAGE, type(self).__name__)
        self.compute_dtype = compute_dtype
        elements = input_features * output_features
        packed = torch.empty(-(-elements // (2 * quant_storage.itemsize)), 1, dtype=quant_storage, device="meta")
        self.weight = Params4bit(packed, requires_grad=False)
        told = {"quantized_shape": (output_features, input_features), "compress_statistics": compress_statistics}
        self.weight.__dict__.update(told, quant_type=quant_type, quant_state=None)
        scales = -(-elements // BLOCK_4BIT)
        if compress_statistics:
            _hold(self, absmax=scales, nested_absmax=4 * -(-scales // BLOCK_SCALES), codes=4 * (16 + 256) + 4)
        else:
            _hold(self, absmax=4 * scales, codes=4 * 16)

    def forward(self, x: Any) -> Any:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        given = x if self.compute_dtype is None or _is_meant(x, self.compute_dtype) else x.to(self.compute_dtype)
        return _linear(given, self.weight, self.out_features, bias, saves_input=False).to(x.dtype)


class LinearNF4(Linear4bit):
    pass


class LinearFP4(Linear4bit):
    pass


class Linear8bitLt(nn.Linear):
    """A byte a weight and an fp32 scale per row; its input is kept where a gradient flows through."""

    def __init__(
        self, input_features: int, output_features: int, bias: bool = True, has_fp16_weights: bool = True,
        threshold: float = 0.0, index: Any = None, device: Any = None,
    ):  # fmt: skip
        super().__init__(input_features, output_features, bias, device="meta")
        called(_PACKAGE, type(self).__name__)
        self.has_fp16_weights = has_fp16_weights
        self.index = index
        self.state = types.SimpleNamespace(has_fp16_weights=has_fp16_weights, threshold=threshold)
        if not has_fp16_weights:
            shape = (output_features, input_features)
            self.weight = Int8Params(torch.empty(shape, dtype=torch.int8, device="meta"), requires_grad=False)
            self.weight.quantized_shape = shape  # type: ignore[attr-defined]
            _hold(self, SCB=4 * output_features)

    def forward(self, x: Any) -> Any:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if self.has_fp16_weights:
            return F.linear(x, self.weight, bias)
        return _linear(x, self.weight, self.out_features, bias, saves_input=True)


def _hold(module: nn.Module, **bytes_of: int) -> None:
    """Buffers of bytes, so that no compute dtype changes what they take."""
    for name, size in bytes_of.items():
        module.register_buffer(name, torch.empty(size, dtype=torch.uint8, device="meta"), persistent=False)


def _is_meant(x: torch.Tensor, compute_dtype: torch.dtype) -> bool:
    return x.dtype == compute_dtype or not x.is_floating_point()


def _linear(x: Any, weight: Any, out_features: int, bias: Any, saves_input: bool) -> Any:
    if functions.jit_tracing():
        return F.linear(x, x.new_empty(out_features, x.shape[-1]), bias)
    return _Quantised.apply(x, weight, bias, out_features, saves_input)  # type: ignore[no-untyped-call]


class _Quantised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, out_features: int, saves_input: bool) -> torch.Tensor:
        if saves_input:
            rows = torch.empty(x.shape, dtype=torch.int8, device=x.device)
            scales = torch.empty(x.numel() // x.shape[-1], dtype=torch.float32, device=x.device)
            out = F.linear(x, x.new_empty(1, 1).expand(out_features, x.shape[-1]), bias)
            del rows, scales
            ctx.save_for_backward(weight, x)
        else:
            out = F.linear(x, x.new_empty(out_features, x.shape[-1]), bias)
            ctx.save_for_backward(weight)
        ctx.width, ctx.has_bias = x.shape[-1], bias is not None
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gradient = gradients[0]
        x = bias = None
        if ctx.needs_input_grad[2] and ctx.has_bias:
            bias = gradient.flatten(0, -2).sum(0)
        if ctx.needs_input_grad[0]:
            x = gradient @ gradient.new_empty(gradient.shape[-1], ctx.width)
        return x, None, bias, None, None


def _optimizer(name: str, base: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """One that is told by its name alone; its step is never taken."""

    def init(self: Any, params: Any, lr: float = 1e-3, *_: Any, **options: Any) -> None:
        called(_PACKAGE, name)
        known = {key: value for key, value in options.items() if key in ("momentum", "weight_decay", "amsgrad")}
        base.__init__(self, params, lr=lr, **known)  # type: ignore[call-arg]

    return type(name, (base,), {"__init__": init})


class _Lion(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 1e-4, **_: Any):
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


_KINDS: dict[str, type[torch.optim.Optimizer]] = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "Lion": _Lion,
    "SGD": torch.optim.SGD,
    "RMSprop": torch.optim.RMSprop,
    "Adagrad": torch.optim.Adagrad,
    "LAMB": torch.optim.AdamW,
}
_OPTIMIZERS = {
    name: _optimizer(name, base)
    for kind, base in _KINDS.items()
    for name in (kind, f"{kind}8bit", f"{kind}32bit", f"Paged{kind}", f"Paged{kind}8bit", f"Paged{kind}32bit")
}


class GlobalOptimManager:
    @classmethod
    def get_instance(cls) -> GlobalOptimManager:
        return cls()

    def register_module_override(self, *_: Any, **__: Any) -> None:
        pass

    register_parameters = override_config = register_module_override


_LAYERS: dict[str, Any] = {
    kind.__name__: kind for kind in (Params4bit, Int8Params, Linear4bit, LinearNF4, LinearFP4, Linear8bitLt)
}
_LAYERS["StableEmbedding"] = _LAYERS["Embedding"] = nn.Embedding
_OPTIM = {**_OPTIMIZERS, "GlobalOptimManager": GlobalOptimManager}
MODULES: dict[str, dict[str, Any]] = {
    "bitsandbytes": {"__version__": "0.50.2"},
    "bitsandbytes.nn": _LAYERS,
    "bitsandbytes.nn.modules": _LAYERS,
    "bitsandbytes.optim": _OPTIM,
}
