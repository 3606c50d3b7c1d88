"""transformers in a script that is traced: models from their configs, quantised layers, flash attention, no generation."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from dsplan.planner.models.one_sequence import one_sequence_a_row
from torch import nn

_NOT_CONFIG = (
    "cache_dir", "force_download", "local_files_only", "token", "use_auth_token", "revision", "subfolder", "proxies",
    "resume_download", "trust_remote_code", "code_revision", "device_map", "low_cpu_mem_usage", "torch_dtype", "dtype",
    "quantization_config", "load_in_4bit", "load_in_8bit", "attn_implementation", "_attn_implementation", "use_safetensors",
    "variant", "state_dict", "from_tf", "from_flax", "ignore_mismatched_sizes", "max_memory", "offload_folder",
    "offload_state_dict", "offload_buffers", "output_loading_info", "_from_auto", "_commit_hash", "adapter_kwargs",
    "adapter_name", "key_mapping", "weights_only", "tp_plan", "tp_size", "device_mesh", "use_kernels", "gguf_file", "mirror",
    "kernel_config", "distributed_config", "generation_config", "fast_init", "_fast_init",
)  # fmt: skip
"""What from_pretrained takes beside the fields of a config."""


def patch_transformers(noted: list[str], when_imported: Callable[[str, Callable[[Any], None]], None]) -> None:
    """As soon as the parts are imported; noted gains what was met."""

    def models(module: Any) -> None:
        _from_config(module, noted)
        _flash_is_there(module)

    when_imported("transformers.modeling_utils", models)
    when_imported("transformers.modeling_flash_attention_utils", _flash_is_there)
    when_imported("transformers.masking_utils", one_sequence_a_row)
    when_imported("transformers.training_args", _gpu_is_there)
    when_imported("transformers.generation.utils", lambda module: _no_generation(module, noted))


def _from_config(modeling_utils: Any, noted: list[str]) -> None:
    """from_pretrained builds from the config: weights decide no byte."""

    def from_pretrained(cls: Any, /, name: Any = None, *args: Any, config: Any = None, **options: Any) -> Any:
        if config is None or isinstance(config, str):
            asked = {key: options[key] for key in ("revision", "subfolder", "cache_dir") if key in options}
            config = cls.config_class.from_pretrained(config or name, **asked)
        for key in ("attn_implementation", "_attn_implementation"):
            if options.get(key) is not None:
                config._attn_implementation = options[key]
        for key, value in options.items():
            if key not in _NOT_CONFIG and hasattr(config, key):
                setattr(config, key, value)
        model = cls(config)
        quantised = _quantised(options, config)
        if quantised is not None:
            noted.extend(note for note in _quantise(model, quantised) if note not in noted)
        model.eval()
        return (model, {}) if options.get("output_loading_info") else model

    modeling_utils.PreTrainedModel.from_pretrained = classmethod(from_pretrained)


def _quantised(options: dict[str, Any], config: Any) -> Any:
    """What says how: a BitsAndBytesConfig, or its like; None: not quantised."""
    asked = options.get("quantization_config") or getattr(config, "quantization_config", None)
    if asked is None and (options.get("load_in_4bit") or options.get("load_in_8bit")):
        asked = {key: options[key] for key in ("load_in_4bit", "load_in_8bit") if key in options}
    return asked


def _quantise(model: nn.Module, asked: Any) -> list[str]:
    """All linears but the output layer, as transformers' replace_with_bnb_linear does. Notes."""
    bnb = importlib.import_module("bitsandbytes").nn

    def said(key: str, default: Any = None) -> Any:
        return asked.get(key, default) if isinstance(asked, dict) else getattr(asked, key, default)

    bits = 4 if said("load_in_4bit") else 8 if said("load_in_8bit") else None
    if bits is None:
        return [f"quantization {said('quant_method')!s} is not known: weights count as they are computed with"]
    kept = list(said("llm_int8_skip_modules") or ())
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    for holder in list(model.modules()):
        for name, held in list(holder.named_children()):
            if type(held) is not nn.Linear or held is output or name in kept or name == "lm_head":
                continue
            sizes = (held.in_features, held.out_features, held.bias is not None)
            layer = (
                bnb.Linear4bit(
                    *sizes,
                    said("bnb_4bit_compute_dtype"),
                    compress_statistics=bool(said("bnb_4bit_use_double_quant", False)),
                    quant_type=said("bnb_4bit_quant_type", "fp4"),
                )
                if bits == 4
                else bnb.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=said("llm_int8_threshold", 6.0))
            )
            setattr(holder, name, layer)
    for param in model.parameters():
        param.requires_grad_(False)
    model.is_quantized = True  # type: ignore[assignment]
    setattr(model, f"is_loaded_in_{bits}bit", True)
    return []


def _flash_is_there(module: Any) -> None:
    """Its kernels are stood in for; which packages a model takes is asked in several modules."""
    if hasattr(module, "is_flash_attn_2_available"):
        module.is_flash_attn_2_available = lambda *_, **__: True
    if hasattr(module, "_get_unpad_data"):
        module._get_unpad_data = _unpadded
    if hasattr(module, "FLASH_ATTENTION_COMPATIBILITY_MATRIX"):
        row = module.FLASH_ATTENTION_COMPATIBILITY_MATRIX.get(2)
        if row is not None:
            row["general_availability_check"] = row["pkg_availability_check"] = lambda *_, **__: True
            row["supported_devices"] = ((lambda: True, "cuda"),)


def _gpu_is_there(training_args: Any) -> None:
    """For what TrainingArguments refuses without one."""
    for name in ("is_torch_bf16_gpu_available", "is_torch_tf32_available"):
        if hasattr(training_args, name):
            setattr(training_args, name, lambda *_, **__: True)


def _unpadded(attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(indices, starts, longest), as if every token were there: which are is not known."""
    batch, length = attention_mask.shape
    indices = torch.arange(batch * length, device=attention_mask.device)
    starts = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=attention_mask.device)
    return indices, starts, int(length)


def _no_generation(module: Any, noted: list[str]) -> None:
    def generate(self: Any, inputs: Any = None, generation_config: Any = None, **options: Any) -> torch.Tensor:
        note = "generate() was answered by zeros: it decides no byte of a training step"
        if note not in noted:
            noted.append(note)
        prompt = inputs if inputs is not None else options.get("input_ids")
        batch, length = prompt.shape[:2] if prompt is not None else (1, 1)
        longest = options.get("max_new_tokens") or getattr(generation_config, "max_new_tokens", None)
        new = longest or max(1, (options.get("max_length") or length + 20) - length)
        return torch.zeros(batch, length + new, dtype=torch.long)

    module.GenerationMixin.generate = generate
