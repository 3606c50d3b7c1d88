"""Adapters, quantised and frozen weights, laid over a model on device meta."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from dsplan.planner.models.adapting import ALL_LINEAR, Lora, Quantized, near
from dsplan.schemas.problem import Problem
from dsplan.schemas.units import count
from torch import nn

NF4_BLOCK, NF4_NESTED_BLOCK = 64, 256
"""Elements that share a scale, and scales that share one. Source: bitsandbytes/functional.py, quantize_4bit."""

_NF4_CODES, _NESTED_CODES = 16, 256
"""Entries of the fp32 tables that each quantised weight keeps: of its values, and of its scales."""


def freeze(source: str, module: nn.Module, patterns: tuple[str, ...]) -> str:
    """Freeze what the globs match: parameters by name, or all that a module holds. A note; Problem where one matches nothing."""
    params = dict(module.named_parameters(remove_duplicate=False))
    modules = dict(module.named_modules(remove_duplicate=False))
    frozen: dict[int, nn.Parameter] = {}
    for pattern in patterns:
        found = [param for name, param in params.items() if fnmatch.fnmatchcase(name, pattern)]
        for name, held in modules.items():
            if name and fnmatch.fnmatchcase(name, pattern):
                found += held.parameters()
        if not found:
            known = near(pattern.strip("*."), [*modules, *params])
            raise Problem(
                f"{source}: --freeze {pattern} matches no parameter and no module{known or _first_names(params)}"
            )
        frozen.update((id(param), param) for param in found)
    for param in frozen.values():
        param.requires_grad_(False)
    if not any(param.requires_grad for param in module.parameters()):
        raise Problem(f"{source}: --freeze {' --freeze '.join(patterns)} freezes every parameter: nothing to train")
    return f"frozen by --freeze: {len(frozen)} tensors of {count(sum(param.numel() for param in frozen.values()))} parameters"


def _first_names(params: dict[str, Any]) -> str:
    return f"; its parameters have names such as {next(iter(params))}"


# LoRA


class LoraLinear(nn.Module):
    """A linear with an adapter beside it. Source: peft/tuners/lora/layer.py and bnb.py, forward."""

    def __init__(self, base_layer: nn.Module, lora: Lora):
        super().__init__()
        wide_in, wide_out = sizes_of(base_layer)
        self.base_layer = base_layer
        with torch.device("meta"):
            self.lora_dropout: nn.Module = nn.Dropout(lora.dropout) if lora.dropout else nn.Identity()
            self.lora_A = nn.Linear(wide_in, lora.r, bias=False)
            self.lora_B = nn.Linear(lora.r, wide_out, bias=False)
        self.scaling = lora.alpha / lora.r

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = self.base_layer(x, *args, **kwargs)
        if isinstance(self.base_layer, Linear4bit):
            result = result.clone()
        return result + self.lora_B(self.lora_A(self.lora_dropout(x))) * self.scaling  # type: ignore[no-any-return]

    @property
    def weight(self) -> torch.Tensor:
        """Some models read it, such as for its dtype."""
        return self.base_layer.weight  # type: ignore[return-value]

    @property
    def bias(self) -> torch.Tensor | None:
        return self.base_layer.bias  # type: ignore[return-value]


class LoraEmbedding(nn.Module):
    """An embedding with an adapter beside it. Source: peft/tuners/lora/layer.py, Embedding."""

    def __init__(self, base_layer: nn.Embedding, lora: Lora):
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Parameter(torch.empty(lora.r, base_layer.num_embeddings, device="meta"))
        self.lora_B = nn.Parameter(torch.empty(base_layer.embedding_dim, lora.r, device="meta"))
        self.scaling = lora.alpha / lora.r

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.base_layer(x)
        after_a = F.embedding(x, self.lora_A.T, self.base_layer.padding_idx)
        return result + (after_a @ self.lora_B.T) * self.scaling  # type: ignore[no-any-return]

    @property
    def weight(self) -> torch.Tensor:
        return self.base_layer.weight


class SavedModule(nn.Module):
    """A module of which PEFT trains a copy, and keeps the frozen original. Source: peft/utils/other.py, ModulesToSaveWrapper."""

    def __init__(self, original: nn.Module, copied: nn.Module):
        super().__init__()
        self.original_module = original
        self.modules_to_save = copied

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.modules_to_save(*args, **kwargs)

    @property
    def weight(self) -> torch.Tensor:
        return self.modules_to_save.weight  # type: ignore[return-value]


def add_lora(source: str, module: nn.Module, lora: Lora) -> list[str]:
    """Freeze the model, and lay adapters beside the targets. Notes; Problem for a target that names no linear.

    Their dtype is the compute dtype: PEFT makes them fp32, but the engine casts all parameters, and keeps fp32 masters.
    Source: peft/tuners/tuners_utils.py, check_target_module_exists and _maybe_include_all_linear_layers.
    """
    named = dict(module.named_modules())
    saved = _saved_modules(source, named, lora)
    targets = _targets(source, module, named, lora, saved)
    for param in module.parameters():
        param.requires_grad_(False)
    new: dict[nn.Module, nn.Module] = {named[name]: SavedModule(named[name], _copy(named[name])) for name in saved}
    for held in (named[name] for name in targets):
        new[held] = LoraEmbedding(held, lora) if isinstance(held, nn.Embedding) else LoraLinear(held, lora)
    _replace(module, new)
    trained = sum(param.numel() for param in module.parameters() if param.requires_grad)
    kinds = list(dict.fromkeys(name.rpartition(".")[2] for name in targets))
    shown = ", ".join(kinds[:8]) + (", ..." if len(kinds) > 8 else "")
    notes = [
        f"LoRA r {lora.r} beside {len(targets)} modules ({shown}): {count(trained)} parameters are trained, the rest is frozen"
    ]
    if lora.targets == (ALL_LINEAR,):
        notes += _experts_left_out(module, "--lora targets=all-linear")
    return notes


def _targets(source: str, module: nn.Module, named: dict[str, nn.Module], lora: Lora, saved: list[str]) -> list[str]:
    if lora.targets == (ALL_LINEAR,):
        left_out = {id(head) for head in _heads(module)}
        found = [name for name, held in named.items() if name and _is_linear(held) and id(held) not in left_out]
        found = [name for name in found if not _within(name, saved)]
        if not found:
            raise Problem(f"{source}: --lora targets=all-linear finds no linear layer but its output; name the targets")
        return found
    found = []
    for target in lora.targets:
        matched = [name for name in named if _ends_with(name, target) and not _within(name, saved)]
        usable = [name for name in matched if _is_linear(named[name]) or isinstance(named[name], nn.Embedding)]
        if not matched:
            ends = dict.fromkeys(name.rpartition(".")[2] for name, held in named.items() if name and _is_linear(held))
            known = near(target, ends) or f"; its linear layers are {', '.join(list(ends)[:8]) or 'none'}"
            raise Problem(f"{source}: --lora targets={target} names no module{known}")
        if len(usable) < len(matched):
            other = next(name for name in matched if name not in usable)
            raise Problem(
                f"{source}: --lora targets={target} names {other}, a {type(named[other]).__name__}, but adapters are for linear "
                "and embedding layers"
            )
        found += [name for name in usable if name not in found]
    return found


def _saved_modules(source: str, named: dict[str, nn.Module], lora: Lora) -> list[str]:
    found = []
    for wanted in lora.modules_to_save:
        matched = [name for name in named if _ends_with(name, wanted)]
        if not matched:
            known = near(wanted, dict.fromkeys(name.rpartition(".")[2] for name in named if name))
            raise Problem(f"{source}: --lora modules_to_save={wanted} names no module{known}")
        found += [name for name in matched if name not in found]
    return found


def _ends_with(name: str, wanted: str) -> bool:
    return name == wanted or name.endswith(f".{wanted}")


def _within(name: str, holders: list[str]) -> bool:
    return any(name == holder or name.startswith(f"{holder}.") for holder in holders)


def _is_linear(module: nn.Module) -> bool:
    """Layers that hold one matrix: torch's, those that are quantised here, and GPT-2's transposed one."""
    return isinstance(module, (nn.Linear, Linear4bit, Linear8bit)) or _is_conv1d(module)


def _is_conv1d(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def sizes_of(linear: nn.Module) -> tuple[int, int]:
    """(in, out)."""
    if _is_conv1d(linear):
        rows, columns = linear.weight.shape  # type: ignore[misc]
        return int(rows), int(columns)
    return linear.in_features, linear.out_features  # type: ignore[return-value]


def _heads(module: nn.Module) -> Iterator[nn.Module]:
    """The output layer, and the classifier's: adapters and quantisation leave them as they are."""
    output = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None  # type: ignore[operator]
    if output is not None:
        yield output
        return
    for name in ("score", "classifier", "qa_outputs", "lm_head"):
        held = getattr(module, name, None)
        if isinstance(held, nn.Module):
            yield from held.modules()


def _copy(module: nn.Module) -> nn.Module:
    import copy

    copied = copy.deepcopy(module)
    for param in copied.parameters():
        param.requires_grad_(True)
    return copied


def _replace(module: nn.Module, new: dict[nn.Module, nn.Module]) -> None:
    """Wherever the keys are held, also where two modules hold the same one."""
    for holder in list(module.modules()):
        for name, child in list(holder.named_children()):
            if child in new:
                setattr(holder, name, new[child])


def _experts_left_out(module: nn.Module, option: str) -> list[str]:
    """A note where most of a model lies in tensors that are no linear layer, as experts in one tensor."""
    for name, held in module.named_modules():
        large = [param for param in held.parameters(recurse=False) if param.dim() == 3]
        if large:
            return [f"{option} leaves out {name} and the like: experts in one tensor are no linear layers"]
    return []


# Quantised weights


class _Quantized(nn.Module):
    """A linear whose weight is bytes. What it computes with is dequantised where it is used."""

    in_features: int
    out_features: int
    weight: nn.Parameter
    quant_state: torch.Tensor

    def __init__(self, linear: nn.Linear, stored_bytes: int, state_bytes: int):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = nn.Parameter(torch.empty(stored_bytes, dtype=torch.uint8, device="meta"), requires_grad=False)
        self.weight.quantized_shape = tuple(linear.weight.shape)  # type: ignore[attr-defined]
        self.register_buffer(
            "quant_state", torch.empty(state_bytes, dtype=torch.uint8, device="meta"), persistent=False
        )
        self.bias = linear.bias

    def dequantized(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_empty(self.out_features, self.in_features)


class Linear4bit(_Quantized):
    """Half a byte an element, with double quantisation: of each 64 a one-byte scale, of each 256 scales an fp32 one.

    Source: bitsandbytes/functional.py, quantize_4bit (compress_statistics), and autograd/_functions.py, MatMul4Bit.
    """

    def __init__(self, linear: nn.Linear):
        numel = linear.weight.numel()
        blocks = math.ceil(numel / NF4_BLOCK)
        nested = math.ceil(blocks / NF4_NESTED_BLOCK)
        super().__init__(linear, math.ceil(numel / 2), blocks + 4 * (nested + _NF4_CODES + _NESTED_CODES + 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return F.linear(x, self.dequantized(x), self.bias)
        return _Matmul4bit.apply(x, self.weight, self.bias, self)  # type: ignore[no-any-return, no-untyped-call]


class Linear8bit(_Quantized):
    """A byte an element, and an fp32 scale a row. Outlier columns, which the data decide, are not counted.

    Source: bitsandbytes/nn/modules.py, Int8Params, and autograd/_functions.py, MatMul8bitLt.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__(linear, linear.weight.numel(), 4 * linear.out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return F.linear(x, self.dequantized(x), self.bias)
        return _Matmul8bit.apply(x, self.weight, self.bias, self)  # type: ignore[no-any-return, no-untyped-call]


class _Matmul4bit(torch.autograd.Function):
    """Saves the packed weight alone; each way a whole weight is dequantised."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, layer: Linear4bit) -> Any:
        ctx.save_for_backward(packed)
        ctx.layer, ctx.biased = layer, bias is not None
        return F.linear(x, layer.dequantized(x), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, None, Any, None]:
        return *_input_and_bias(ctx, gradients[0], ctx.layer.dequantized(gradients[0])), None


class _Matmul8bit(torch.autograd.Function):
    """Saves its input; forward makes an int8 copy of it and an int32 product, backward a dequantised weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, layer: Linear8bit) -> Any:
        ctx.save_for_backward(x)
        ctx.layer, ctx.biased = layer, bias is not None
        rows = x.numel() // x.shape[-1]
        half = x.to(torch.float16)
        quantized, scales = torch.empty_like(x, dtype=torch.int8), x.new_empty(rows, dtype=torch.float32)
        del half
        product = x.new_empty(rows, layer.out_features, dtype=torch.int32)
        made = x.new_empty(*x.shape[:-1], layer.out_features)
        del product, quantized, scales
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, None, Any, None]:
        return *_input_and_bias(ctx, gradients[0], ctx.layer.dequantized(gradients[0])), None


def _input_and_bias(ctx: Any, gradient: torch.Tensor, weight: torch.Tensor) -> tuple[Any, None, Any]:
    to_input = gradient @ weight if ctx.needs_input_grad[0] else None
    summed = tuple(range(gradient.dim() - 1))
    to_bias = gradient.sum(summed) if ctx.biased and ctx.needs_input_grad[2] else None
    return to_input, None, to_bias


_LAYERS: dict[Quantized, Callable[[nn.Linear], _Quantized]] = {"nf4": Linear4bit, "int8": Linear8bit}


def quantize(source: str, module: nn.Module, kind: Quantized) -> list[str]:
    """Replace the linears but the output layer by quantised, frozen ones. Notes; Problem where there is none to replace.

    Source: transformers/quantizers/base.py, get_modules_to_not_convert (the output layer, and what is tied to it).
    """
    left_out = {id(head) for head in _heads(module)}
    tied = _shared_params(module)
    found = [
        (name, held)
        for name, held in module.named_modules()
        if type(held) is nn.Linear and id(held) not in left_out and id(held.weight) not in tied
    ]
    if not found:
        kinds = (
            "Conv1D (as in GPT-2) is not replaced"
            if any(map(_is_conv1d, module.modules()))
            else "only nn.Linear is replaced"
        )
        raise Problem(f"{source}: --quantize {kind} finds no linear layer to quantise: {kinds}; leave it out")
    numel = sum(held.weight.numel() for _, held in found)
    _replace(module, {held: _LAYERS[kind](held) for _, held in found})
    return [
        f"{kind}: {len(found)} linear layers of {count(numel)} parameters are quantised and frozen, as bitsandbytes does; "
        "the output layer, embeddings and norms are not",
        *_experts_left_out(module, f"--quantize {kind}"),
    ]


def _shared_params(module: nn.Module) -> set[int]:
    seen: set[int] = set()
    shared: set[int] = set()
    for held in module.modules():
        for param in held.parameters(recurse=False):
            (shared if id(param) in seen else seen).add(id(param))
    return shared
