"""What liger_kernel offers: norms, gated layers, rotary embedding and losses in one kernel each, and patches of transformers.

Source of names and arguments: liger_kernel/transformers/*.py of 0.8.
"""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from dsplan.planner.capturing.standing import functions
from dsplan.planner.capturing.standing.calls import called, told
from dsplan.schemas.problem import Problem
from torch import nn

_PACKAGE = "liger_kernel"


class LigerRMSNorm(nn.Module):
    """Backward writes over the gradient that it is given, unless in_place is false."""

    weight: nn.Parameter | None

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama", init_fn: str = "ones",
        in_place: bool = True, row_mode: Any = None, elementwise_affine: bool = True,
    ):  # fmt: skip
        super().__init__()
        self.variance_epsilon = eps
        self.in_place = in_place
        self.register_parameter("weight", nn.Parameter(torch.ones(hidden_size)) if elementwise_affine else None)

    def forward(self, hidden_states: Any) -> Any:
        called(_PACKAGE, "LigerRMSNorm")
        return functions.rms_norm(hidden_states, self.weight, in_place=getattr(self, "in_place", True))


class LigerLayerNorm(nn.Module):
    def __init__(self, hidden_size: int, eps: float = 1e-6, bias: bool = False, init_fn: str = "ones"):
        super().__init__()
        self.variance_epsilon = eps
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size), requires_grad=bias)

    def forward(self, hidden_states: Any) -> Any:
        called(_PACKAGE, "LigerLayerNorm")
        return functions.layer_norm(hidden_states, self.weight, self.bias)


class _GatedMLP(nn.Module):
    def __init__(self, config: Any, intermediate_size: int | None = None, *_: Any, **__: Any):
        super().__init__()
        inner = intermediate_size or config.intermediate_size
        self.config = config
        self.hidden_size, self.intermediate_size = config.hidden_size, inner
        self.gate_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.down_proj = nn.Linear(inner, config.hidden_size, bias=False)


def _gated_forward(self: Any, x: Any) -> Any:
    return self.down_proj(functions.gated(self.gate_proj(x), self.up_proj(x)))


class LigerSwiGLUMLP(_GatedMLP):
    def forward(self, x: Any) -> Any:
        called(_PACKAGE, "LigerSwiGLUMLP")
        return _gated_forward(self, x)


class LigerGEGLUMLP(_GatedMLP):
    def forward(self, x: Any) -> Any:
        called(_PACKAGE, "LigerGEGLUMLP")
        return _gated_forward(self, x)


class LigerPhi3SwiGLUMLP(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Any) -> Any:
        called(_PACKAGE, "LigerPhi3SwiGLUMLP")
        return self.down_proj(functions.gated(*self.gate_up_proj(x).chunk(2, dim=-1)))


class LigerCrossEntropyLoss(nn.Module):
    """The gradient is written over the logits."""

    def __init__(self, *_: Any, reduction: str = "mean", **__: Any):
        super().__init__()
        self.reduction = reduction

    def forward(self, _input: Any, target: Any, *_: Any) -> Any:
        return liger_cross_entropy(_input, target, reduction=self.reduction)


@told(_PACKAGE)
def liger_cross_entropy(input: Any, target: Any, *_: Any, reduction: str = "mean", **__: Any) -> Any:
    return functions.cross_entropy(input, target, reduction=reduction)


class LigerFusedLinearCrossEntropyLoss(nn.Module):
    """Of the logits one chunk is there at a time."""

    def __init__(self, *_: Any, reduction: str = "mean", accum_dtype: torch.dtype | None = None, **__: Any):
        super().__init__()
        self.reduction = reduction
        self.accum_dtype = accum_dtype

    def forward(self, lin_weight: Any, _input: Any, target: Any, bias: Any = None) -> Any:
        return liger_fused_linear_cross_entropy(
            _input, lin_weight, target, bias, reduction=self.reduction, accum_dtype=self.accum_dtype
        )


@told(_PACKAGE)
def liger_fused_linear_cross_entropy(
    input: Any,
    weight: Any,
    target: Any,
    bias: Any = None,
    *_: Any,
    reduction: str = "mean",
    accum_dtype: Any = None,
    **__: Any,
) -> Any:
    return functions.linear_cross_entropy(
        input, weight, target, bias, reduction=reduction, accumulate_dtype=accum_dtype
    )


@told(_PACKAGE)
def liger_rotary_pos_emb(q: Any, k: Any, cos: Any, sin: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
    """In place where q and k lie as [batch, length, heads, dim]; else over a copy."""
    return _turned(q, cos, sin), _turned(k, cos, sin)


def _turned(x: Any, cos: Any, sin: Any) -> Any:
    rows = x.transpose(1, 2)
    return functions.rotary(rows, cos, sin, in_place=rows.is_contiguous()).transpose(1, 2)


@told(_PACKAGE)
def liger_swiglu(gate: Any, up: Any, *_: Any) -> Any:
    return functions.gated(gate, up)


def _causal_lm_forward(
    self: Any, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, logits_to_keep: Any = 0,
    num_items_in_batch: Any = None, skip_logits: bool | None = None, **options: Any,
) -> Any:  # fmt: skip
    """The forward of a causal language model, its output layer fused with the loss where there are labels."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    for name in ("return_dict", "output_router_logits"):
        options.pop(name, None)
    shift_labels = options.pop("shift_labels", None)
    outputs = self.model(input_ids=input_ids, attention_mask=attention_mask, **options)
    hidden = outputs[0]
    if labels is None and shift_labels is None:
        return CausalLMOutputWithPast(logits=self.lm_head(hidden))
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    loss = liger_fused_linear_cross_entropy(
        hidden.view(-1, hidden.shape[-1]),
        self.lm_head.weight,
        shift_labels.view(-1),
        getattr(self.lm_head, "bias", None),
    )
    return CausalLMOutputWithPast(loss=loss, logits=None)


_SWIGLU: dict[str, type[nn.Module]] = {"MLP": LigerSwiGLUMLP}
_GEGLU: dict[str, type[nn.Module]] = {"MLP": LigerGEGLUMLP}
_FAMILIES: dict[str, dict[str, type[nn.Module]]] = {
    **dict.fromkeys(
        ("llama", "mistral", "ministral", "qwen2", "qwen3", "granite", "smollm3", "olmo2", "olmo3"), _SWIGLU
    ),
    "phi3": {"MLP": LigerPhi3SwiGLUMLP},
    **dict.fromkeys(("gemma", "gemma2"), _GEGLU),
    "mixtral": {},
    "qwen3_moe": {},
}
"""The model types of transformers that are patched, and the classes that are replaced beside norms."""

_NO_FUSED_ROPE = ("granite",)
_KEEPS_GRADIENT = ("gemma2", "olmo2", "olmo3")
"""Their norms follow one another, so that backward may not write in place (liger_kernel/transformers/monkey_patch.py)."""


def _apply(
    kind: str, rope: bool = True, cross_entropy: bool = False, fused_linear_cross_entropy: bool = True, rms_norm: bool = True,
    swiglu: bool = True, geglu: bool = True, model: Any = None, **_: Any,
) -> None:  # fmt: skip
    """Patch transformers' classes of that model type; a model that is given is changed as well."""
    called(_PACKAGE, f"apply_liger_kernel_to_{kind}")
    modeling = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    swapped = dict(_FAMILIES[kind]) if swiglu and geglu else {}
    if rms_norm:
        in_place = kind not in _KEEPS_GRADIENT
        swapped["RMSNorm"] = LigerRMSNorm if in_place else _with_copy()
    if rope and kind not in _NO_FUSED_ROPE and hasattr(modeling, "apply_rotary_pos_emb"):
        modeling.apply_rotary_pos_emb = liger_rotary_pos_emb  # type: ignore[attr-defined]
    by_suffix = {}
    for name in dir(modeling):
        for suffix, instead in swapped.items():
            if name.lower() == f"{kind.replace('_', '')}{suffix.lower()}":
                by_suffix[getattr(modeling, name)] = instead
                setattr(modeling, name, instead)
    if cross_entropy:
        loss_utils = importlib.import_module("transformers.loss.loss_utils")
        loss_utils.nn.functional.cross_entropy = liger_cross_entropy
    if fused_linear_cross_entropy:
        if model is not None:
            inner = model.get_base_model() if hasattr(model, "get_base_model") else model
            inner.forward = types.MethodType(_causal_lm_forward, inner)
        else:
            causal = next(
                getattr(modeling, name)
                for name in dir(modeling)
                if name.lower() == f"{kind.replace('_', '')}forcausallm"
            )
            causal.forward = _causal_lm_forward
    for module in model.modules() if model is not None else ():
        for original, instead in by_suffix.items():
            if type(module) is original:
                module.forward = types.MethodType(instead.forward, module)


@functools.cache
def _with_copy() -> type[nn.Module]:
    class LigerRMSNormWithCopy(LigerRMSNorm):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **{**kwargs, "in_place": False})

    return LigerRMSNormWithCopy


def _apply_to(model: Any, **options: Any) -> None:
    """As Trainer's use_liger_kernel does, to a model that is there."""
    _by_type(getattr(model.config, "model_type", ""))(model=model, **options)


def _apply_by_type(model_type: str, **options: Any) -> None:
    _by_type(model_type)(**options)


def _by_type(model_type: str) -> Callable[..., None]:
    if model_type not in _FAMILIES:
        raise Problem(
            f"liger_kernel for model type {model_type!r} has no stand-in (there are {', '.join(_FAMILIES)}); trace the model "
            "without Liger, which takes more bytes"
        )
    return functools.partial(_apply, model_type)


class AutoLigerKernelForCausalLM:
    @staticmethod
    def from_pretrained(name: Any, *args: Any, **options: Any) -> Any:
        transformers = importlib.import_module("transformers")
        config = transformers.AutoConfig.from_pretrained(name)
        _apply_by_type(config.model_type)
        kept = {
            key: value for key, value in options.items() if key not in ("rope", "rms_norm", "swiglu", "cross_entropy")
        }
        return transformers.AutoModelForCausalLM.from_pretrained(name, *args, **kept)


_LAYERS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        LigerRMSNorm,
        LigerLayerNorm,
        LigerSwiGLUMLP,
        LigerGEGLUMLP,
        LigerPhi3SwiGLUMLP,
        LigerCrossEntropyLoss,
        LigerFusedLinearCrossEntropyLoss,
        AutoLigerKernelForCausalLM,
    )
}
_PATCHES: dict[str, Any] = {
    "_apply_liger_kernel": _apply_by_type,
    "_apply_liger_kernel_to_instance": _apply_to,
    **{f"apply_liger_kernel_to_{kind}": functools.partial(_apply, kind) for kind in _FAMILIES},
}
_FUNCTIONS = {
    "liger_cross_entropy": liger_cross_entropy,
    "liger_fused_linear_cross_entropy": liger_fused_linear_cross_entropy,
    "liger_swiglu": liger_swiglu,
    "liger_rms_norm": told(_PACKAGE)(functions.rms_norm),
}
MODULES: dict[str, dict[str, Any]] = {
    "liger_kernel": {"__version__": "0.8.5"},
    "liger_kernel.transformers": {**_LAYERS, **_PATCHES, "liger_rotary_pos_emb": liger_rotary_pos_emb},
    "liger_kernel.transformers.monkey_patch": _PATCHES,
    "liger_kernel.transformers.functional": _FUNCTIONS,
    "liger_kernel.transformers.rms_norm": {"LigerRMSNorm": LigerRMSNorm},
    "liger_kernel.transformers.layer_norm": {"LigerLayerNorm": LigerLayerNorm},
    "liger_kernel.transformers.rope": {"liger_rotary_pos_emb": liger_rotary_pos_emb},
    "liger_kernel.transformers.swiglu": {
        "LigerSwiGLUMLP": LigerSwiGLUMLP,
        "LigerPhi3SwiGLUMLP": LigerPhi3SwiGLUMLP,
    },
    "liger_kernel.transformers.geglu": {"LigerGEGLUMLP": LigerGEGLUMLP},
    "liger_kernel.transformers.cross_entropy": {"LigerCrossEntropyLoss": LigerCrossEntropyLoss},
    "liger_kernel.transformers.fused_linear_cross_entropy": {
        "LigerFusedLinearCrossEntropyLoss": LigerFusedLinearCrossEntropyLoss
    },
}
