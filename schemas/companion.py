"""What stands beside a DeepSpeed JSON: HF TrainingArguments, Accelerate, axolotl or LLaMA-Factory, as JSON or YAML."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dsplan.schemas.problem import Problem

Kind = Literal["trainer", "accelerate", "axolotl", "llama-factory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Companion:
    """The values of one companion file, under our names; None: the file does not say."""

    kind: Kind
    source: str
    micro_batch: int | None = None
    accumulation: int | None = None
    precision: str | None = None
    recompute: str | None = None
    seq_len: int | None = None
    optimizer: str | None = None
    gradient_clipping: float | None = None
    zero_stage: int | None = None
    offload: str | None = None


def read_companion(path: str) -> Companion:
    """The companion file at `path`, its kind told by its keys. Problem where it cannot be read or is none of the four."""
    raw = _load(path)
    for kind, told_by, fields in _KINDS:
        if told_by(raw):
            return Companion(kind=kind, source=path, **_checked(path, fields(raw)))
    raise Problem(
        f"{path}: is none of HF TrainingArguments (per_device_train_batch_size), Accelerate (distributed_type), "
        "axolotl (base_model, micro_batch_size) and LLaMA-Factory (finetuning_type); --args takes one of these"
    )


def _load(path: str) -> Mapping[str, Any]:
    try:
        text = Path(path).read_text("utf-8")
    except OSError as error:
        raise Problem(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise Problem(f"{path}: is not UTF-8 text (byte {error.start})") from error
    try:
        if path.endswith(".json"):
            value = json.loads(text)
        else:
            import yaml

            try:
                value = yaml.safe_load(text)
            except yaml.YAMLError as error:
                mark = getattr(error, "problem_mark", None)
                where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
                raise Problem(f"{path}{where}: is not YAML ({getattr(error, 'problem', error)})") from error
    except (ValueError, RecursionError) as error:
        raise Problem(f"{path}: is not JSON ({error})") from error
    if not isinstance(value, Mapping):
        raise Problem(f"{path}: must be an object of options, not {type(value).__name__}")
    return value


def _trainer(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "micro_batch": raw.get("per_device_train_batch_size"),
        "accumulation": raw.get("gradient_accumulation_steps"),
        "precision": _flags(raw),
        "recompute": _checkpointing(raw),
        "seq_len": raw.get("max_seq_length", raw.get("cutoff_len", raw.get("max_length"))),
        "optimizer": _optimizer(raw.get("optim")),
        "gradient_clipping": raw.get("max_grad_norm"),
    }


def _accelerate(raw: Mapping[str, Any]) -> dict[str, Any]:
    inner = raw.get("deepspeed_config") or {}
    if not isinstance(inner, Mapping):
        inner = {}
    mixed = raw.get("mixed_precision")
    offload = (
        "param"
        if inner.get("offload_param_device") in ("cpu", "nvme")
        else "optimizer"
        if inner.get("offload_optimizer_device") in ("cpu", "nvme")
        else None
    )
    return {
        "accumulation": inner.get("gradient_accumulation_steps"),
        "precision": {"no": "fp32", "fp16": "fp16", "bf16": "bf16"}.get(str(mixed).lower())
        if mixed is not None
        else None,
        "gradient_clipping": inner.get("gradient_clipping"),
        "zero_stage": inner.get("zero_stage"),
        "offload": offload,
    }


def _axolotl(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "micro_batch": raw.get("micro_batch_size"),
        "accumulation": raw.get("gradient_accumulation_steps"),
        "precision": _flags(raw),
        "recompute": _checkpointing(raw),
        "seq_len": raw.get("sequence_len"),
        "optimizer": _optimizer(raw.get("optimizer")),
        "gradient_clipping": raw.get("max_grad_norm"),
    }


def _flags(raw: Mapping[str, Any]) -> str | None:
    if raw.get("bf16") in (True, "true", "full", "auto"):
        return "bf16"
    if raw.get("fp16") in (True, "true"):
        return "fp16"
    return "fp32" if raw.get("bf16") is False or raw.get("fp16") is False else None


def _checkpointing(raw: Mapping[str, Any]) -> str | None:
    value = raw.get("gradient_checkpointing")
    return None if value is None else "full" if value else "none"


def _optimizer(name: Any) -> str | None:
    """Our name for the trainer's: adamw_torch and adamw_torch_fused are adamw."""
    if not isinstance(name, str):
        return None
    head = name.lower().split("_")[0]
    return head if head in ("adamw", "adam", "sgd", "adagrad", "lion") and "bit" not in name else None


_KINDS: tuple[tuple[Kind, Callable[[Mapping[str, Any]], bool], Callable[[Mapping[str, Any]], dict[str, Any]]], ...] = (
    ("accelerate", lambda raw: "distributed_type" in raw or "deepspeed_config" in raw, _accelerate),
    ("llama-factory", lambda raw: "finetuning_type" in raw or "model_name_or_path" in raw, _trainer),
    ("axolotl", lambda raw: "base_model" in raw or "micro_batch_size" in raw, _axolotl),
    (
        "trainer",
        lambda raw: bool({"per_device_train_batch_size", "learning_rate", "gradient_accumulation_steps"} & set(raw)),
        _trainer,
    ),
)


def _checked(path: str, values: dict[str, Any]) -> dict[str, Any]:
    for name in ("micro_batch", "accumulation", "seq_len"):
        value = values.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise Problem(f"{path}: {name} is {value!r}, but must be a whole number of at least 1")
    stage = values.get("zero_stage")
    if stage is not None and stage not in (0, 1, 2, 3):
        raise Problem(f"{path}: zero_stage is {stage!r}, but must be 0, 1, 2 or 3")
    return values
