"""A Hugging Face config.json -> the model that its `architectures` names, on device meta, with inputs of its kind."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dsplan.planner.compiler_put_off import compiler_put_off
from dsplan.planner.models.adapted import adapt
from dsplan.planner.models.adapting import AS_IT_IS, Adapting
from dsplan.planner.models.adapting_attention import choose_attention, packed
from dsplan.planner.models.blaming import user_code
from dsplan.planner.models.load import ModelSubject, read_json
from dsplan.planner.models.weightless import build_weightless
from dsplan.schemas.problem import Problem

LONGEST_SEQ_LEN = 4096
"""What --seq-len is by default, where the model takes more."""

NUM_CHOICES = 4
"""Of a multiple-choice model: as in RACE and SWAG."""

POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "max_target_positions")


def cached_config(name: str) -> Path:
    """config.json of a model in the Hugging Face cache. Nothing is downloaded."""
    missing = Problem(
        f"{name}: no such file or folder, and no model of that name in the Hugging Face cache; give a model file, a "
        "training script, a config.json or the folder that holds one"
    )
    if name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise missing
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, "config.json")
    except (ImportError, ValueError):
        raise missing from None
    if not isinstance(found, str):
        raise missing
    return Path(found)


def load_hf(source: str, path: Path, seq_len: int | None, adapting: Adapting = AS_IT_IS) -> ModelSubject:
    """The model of a config.json, without weights. Problem where the file is no such config or transformers lacks it."""
    raw = read_json(path)
    if not isinstance(raw, dict) or not ("model_type" in raw or "architectures" in raw):
        raise Problem(
            f'{path}: holds neither "model_type" nor "architectures"; give the config.json of a Hugging Face model'
        )
    architecture = _architecture(path, raw)
    notes = _left_aside(path, raw, adapting)
    try:
        with compiler_put_off():
            config_class, model_class = _classes(path, raw, architecture)
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "transformers" and _missing("transformers"):
            raise Problem(f"{path}: needs transformers; pip install 'dsplan[hf]'") from error
        raise
    with user_code(path, f"{config_class.__name__} does not accept it:"):
        config = config_class.from_dict(raw)
        _settle(config)
    if adapting.attention is not None:
        notes += choose_attention(str(path), config, model_class, adapting.attention)
    with user_code(path, f"{model_class.__name__} cannot be built from it:"):
        module = build_weightless(lambda: model_class(config))
    module.train()
    notes += adapt(str(path), module, adapting)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    sample = _sampler(architecture, config, text)
    if adapting.packed:
        sample = packed(str(path), module, sample)
    if sample is None:
        notes.append(
            f"{path}: the inputs of {architecture} are not known, so only its parameters, gradients and optimizer state "
            "are counted; write a model.py with build_model() and sample_batch() for the rest"
        )
    elif _takes_pixels(architecture):
        if seq_len is not None:
            notes.append(
                f"seq_len {seq_len} has no effect on {architecture}, which takes images of the size in its config"
            )
    elif seq_len is None:
        seq_len, origin = _own_seq_len(text)
        notes.append(f"seq_len {seq_len} ({origin}); --seq-len changes it")
    else:
        notes += _check_seq_len(path, module, text, seq_len)
    hidden_size = raw.get("hidden_size")
    return ModelSubject(
        source=source,
        kind="hf",
        notes=tuple(notes),
        seq_len=seq_len,
        module=module,
        sample_batch=sample,
        file=path,
        hidden_size=hidden_size if isinstance(hidden_size, int) else None,
    )


def _missing(package: str) -> bool:
    return importlib.util.find_spec(package) is None


def _architecture(path: Path, raw: Mapping[str, Any]) -> str:
    named = raw.get("architectures")
    if named is None:
        raise Problem(f'{path}: names no class; add "architectures": ["{_usual_class(raw)}"]')
    if not isinstance(named, list) or not named or not isinstance(named[0], str):
        raise Problem(
            f'{path}: architectures is {named!r}, but must be a list that names a class: ["LlamaForCausalLM"]'
        )
    return named[0]


def _usual_class(raw: Mapping[str, Any]) -> str:
    """The class that a model_type most often goes with."""
    try:
        auto = importlib.import_module("transformers.models.auto.modeling_auto")
    except ImportError:
        return "...ForCausalLM"
    for mapping in ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "IMAGE_CLASSIFICATION"):
        named = getattr(auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES", {}).get(raw.get("model_type"))
        if isinstance(named, str):
            return named
    return "...ForCausalLM"


def _left_aside(path: Path, raw: Mapping[str, Any], adapting: Adapting) -> list[str]:
    """A note where the config speaks of quantised weights, which only --quantize makes."""
    said = raw.get("quantization_config")
    if not isinstance(said, Mapping) or adapting.quantize is not None:
        return []
    method = said.get("quant_method", "quantised")
    return [
        f"{path}: quantization_config ({method}) is not applied: weights count in the compute dtype; --quantize nf4 or int8 "
        "counts them as bitsandbytes stores them"
    ]


def _classes(path: Path, raw: Mapping[str, Any], architecture: str) -> tuple[Any, Any]:
    """(config class, model class). Only the modules that hold them are imported."""
    transformers = importlib.import_module("transformers")
    model_class = getattr(transformers, architecture, None)
    if model_class is None and "auto_map" in raw:
        raise Problem(
            f"{path}: {architecture} is code that comes with the weights (auto_map), which dsplan does not run; write a model.py "
            "whose build_model() imports that code and makes the model, with sample_batch(micro_batch, seq_len=None)"
        )
    if model_class is None or not hasattr(model_class, "config_class"):
        raise Problem(
            f"{path}: transformers {transformers.__version__} has no {architecture}; write a model.py with build_model() "
            "for a model that is not part of it"
        )
    config_class = model_class.config_class
    kind = raw.get("model_type")
    if kind is not None and config_class.model_type != kind:
        raise Problem(
            f'{path}: model_type is "{kind}", but {architecture} takes "{config_class.model_type}"; correct one of the two'
        )
    return config_class, model_class


def _settle(config: Any) -> None:
    """Train as usual: no cache of keys and values. Attention is fused where the class can (transformers' own choice)."""
    config.use_cache = False
    if getattr(config, "is_encoder_decoder", False):  # labels are shifted by these; their values change no byte
        for name in ("decoder_start_token_id", "pad_token_id"):
            if getattr(config, name, None) is None:
                setattr(config, name, 0)
    if getattr(config, "problem_type", None) is None:  # else some classes look for it in the labels' values
        config.problem_type = "regression" if getattr(config, "num_labels", 2) == 1 else "single_label_classification"
    for part in [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", {}))]:
        if part is not None:
            part.use_cache = False


def _takes_pixels(architecture: str) -> bool:
    return architecture.endswith("ForImageClassification")


def _own_seq_len(text: Any) -> tuple[int, str]:
    longest, name, value = _longest(text)
    if longest is None:
        return LONGEST_SEQ_LEN, "the default, since the config has no longest length"
    if longest > LONGEST_SEQ_LEN:
        return LONGEST_SEQ_LEN, f"the smaller of {name} {value} and {LONGEST_SEQ_LEN}"
    return longest, f"{name} of the config"


def _longest(text: Any) -> tuple[int | None, str, int]:
    """(the longest sequence, the key that says so, its value)."""
    for name in POSITIONS:
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            # where positions start after the padding
            reserved = 2 if "roberta" in str(getattr(text, "model_type", "")) else 0
            return value - reserved, getattr(text, "attribute_map", {}).get(name, name), value
    return None, "", 0


def _check_seq_len(path: Path, module: Any, text: Any, seq_len: int) -> list[str]:
    """Problem where a table of positions ends before the sequence; a note where a config's length does."""
    longest, name, value = _longest(text)
    if longest is None or seq_len <= longest:
        return []
    table = next((held for held, part in module.named_modules() if _is_position_table(held, part)), None)
    said = f"{name} {value} of the config" + (
        f" (of which 2 are kept for padding: {longest})" if longest < value else ""
    )
    if table is None:
        return [
            f"{path}: seq_len {seq_len} is longer than {said}: the model runs, but has no positions learned beyond it"
        ]
    raise Problem(
        f"{path}: seq_len {seq_len} is longer than {said}, the rows of {table}; give --seq-len {longest} or less, or raise {name}"
    )


def _is_position_table(name: str, module: Any) -> bool:
    own = name.rpartition(".")[2]
    weight = getattr(module, "weight", None)
    return ("position" in own or own == "wpe") and getattr(weight, "ndim", 0) == 2 and "relative" not in own


def _sampler(architecture: str, config: Any, text: Any) -> Callable[[int, int | None], dict[str, Any]] | None:
    import torch

    def tokens(micro_batch: int, seq_len: int | None) -> torch.Tensor:
        return torch.zeros(micro_batch, seq_len or 1, dtype=torch.long)

    def language(micro_batch: int, seq_len: int | None) -> dict[str, Any]:
        return {"input_ids": tokens(micro_batch, seq_len), "labels": tokens(micro_batch, seq_len)}

    def per_sequence(micro_batch: int, seq_len: int | None) -> dict[str, Any]:
        return {"input_ids": tokens(micro_batch, seq_len), "labels": torch.zeros(micro_batch, dtype=torch.long)}

    def spans(micro_batch: int, seq_len: int | None) -> dict[str, Any]:
        ends = torch.zeros(micro_batch, dtype=torch.long)
        return {"input_ids": tokens(micro_batch, seq_len), "start_positions": ends, "end_positions": ends.clone()}

    def images(micro_batch: int, seq_len: int | None) -> dict[str, Any]:
        size = getattr(config, "image_size", 224)
        side = size if isinstance(size, (list, tuple)) else (size, size)
        pixels = torch.zeros(micro_batch, config.num_channels, *side)
        return {"pixel_values": pixels, "labels": torch.zeros(micro_batch, dtype=torch.long)}

    def speech(micro_batch: int, seq_len: int | None) -> dict[str, Any]:
        features = torch.zeros(micro_batch, config.num_mel_bins, 2 * config.max_source_positions)
        return {"input_features": features, "labels": tokens(micro_batch, seq_len)}

    def choices(micro_batch: int, seq_len: int | None) -> dict[str, Any]:
        several = torch.zeros(micro_batch, NUM_CHOICES, seq_len or 1, dtype=torch.long)
        return {"input_ids": several, "labels": torch.zeros(micro_batch, dtype=torch.long)}

    def bare(micro_batch: int, seq_len: int | None) -> dict[str, Any]:
        return {"input_ids": tokens(micro_batch, seq_len)}

    if architecture == "WhisperForConditionalGeneration":
        return speech
    if getattr(config, "vision_config", None) is not None or getattr(config, "audio_config", None) is not None:
        return None
    if _takes_pixels(architecture):
        return images if hasattr(config, "num_channels") else None
    if not isinstance(getattr(text, "vocab_size", None), int):
        return None
    if architecture.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForTokenClassification")):
        return language
    if architecture.endswith("ForConditionalGeneration") and getattr(config, "is_encoder_decoder", False):
        return language
    if architecture.endswith("ForSequenceClassification"):
        return per_sequence
    if architecture.endswith("ForMultipleChoice"):
        return choices
    if architecture.endswith("Model") and not getattr(config, "is_encoder_decoder", False):
        return bare
    return spans if architecture.endswith("ForQuestionAnswering") else None
