"""What stands beside a DeepSpeed JSON: HF TrainingArguments, Accelerate, axolotl or LLaMA-Factory, as JSON or YAML."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dsplan.schemas.optimizer import optimizer_named
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
    config_file: str | None = None
    """The DeepSpeed JSON that the companion names."""
    beside_config_file: tuple[str, ...] = ()
    """What Accelerate refuses in its own file where that names a config_file."""
    processes: int | None = None
    """Over all machines (Accelerate's num_processes)."""
    mixed_precision: str | None = None
    """Accelerate's word: no, fp16, bf16 or fp8."""
    optimizer_device: str | None = None
    param_device: str | None = None
    optimizer_nvme_path: str | None = None
    param_nvme_path: str | None = None
    gather_16bit: bool | None = None
    """Accelerate's zero3_save_16bit_model."""
    learning_rate: float | None = None
    adam_beta1: float | None = None
    adam_beta2: float | None = None
    adam_epsilon: float | None = None
    weight_decay: float | None = None
    warmup_steps: int | None = None
    warmup_ratio: float | None = None
    max_steps: int | None = None
    optim: str | None = None
    """The trainer's own word for the optimizer, as adamw_torch_fused."""
    lr_scheduler: str | None = None
    finds_batch: bool = False
    """The Trainer looks for a micro-batch that fits, so none is compared (auto_find_batch_size)."""


def read_companion(path: str) -> Companion:
    """The companion file at `path`, its kind told by its keys. Problem where it cannot be read or is none of the four."""
    return companion_of(load_options(path), path)


def companion_of(raw: Mapping[str, Any], path: str, kind: Kind | None = None) -> Companion:
    """The same of the options themselves. `path` names them in messages; kind: known without a look at the keys."""
    for known, told_by, fields in _KINDS:
        if known == kind or (kind is None and told_by(raw)):
            return Companion(kind=known, source=path, **_checked(path, known, fields(raw)))
    raise Problem(
        f"{path}: is none of HF TrainingArguments (per_device_train_batch_size), Accelerate (distributed_type), "
        "axolotl (base_model, micro_batch_size) and LLaMA-Factory (finetuning_type); --args takes one of these"
    )


def load_options(path: str) -> Mapping[str, Any]:
    """The object of a JSON or YAML file. Problem where it holds none."""
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
                said = " ".join(str(getattr(error, "problem", None) or error).split())
                raise Problem(f"{path}{where}: is not YAML ({said})") from error
    except RecursionError as error:
        raise Problem(f"{path}: is nested too deep") from error
    except ValueError as error:
        raise Problem(f"{path}: is not {'JSON' if path.endswith('.json') else 'YAML'} ({error})") from error
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
        **_training(raw),
        "optim": raw.get("optim"),
        "adam_beta1": raw.get("adam_beta1"),
        "adam_beta2": raw.get("adam_beta2"),
        "adam_epsilon": raw.get("adam_epsilon"),
        "lr_scheduler": raw.get("lr_scheduler_type"),
        "finds_batch": _true(raw.get("auto_find_batch_size")),
    }


def _training(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What TrainingArguments and axolotl call by the same name. warmup_steps below 1 is a share of all steps."""
    warmup = raw.get("warmup_steps")
    share = isinstance(warmup, (float, str)) and 0 < (_float(warmup) or 0) < 1
    deepspeed = raw.get("deepspeed")
    steps = raw.get("max_steps")
    return {
        "learning_rate": raw.get("learning_rate"),
        "weight_decay": raw.get("weight_decay"),
        "warmup_steps": None if share else warmup,
        "warmup_ratio": warmup if share else raw.get("warmup_ratio"),
        "max_steps": None if steps in (-1, 0) else steps,
        "config_file": deepspeed if isinstance(deepspeed, str) and deepspeed else None,
    }


_REFUSED_BESIDE = (
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_stage",
    "offload_optimizer_device",
    "offload_optimizer_nvme_path",
    "offload_param_device",
    "offload_param_nvme_path",
    "zero3_save_16bit_model",
    "mixed_precision",
)
"""Source: accelerate/utils/dataclasses.py, _deepspeed_config_checks."""


def _accelerate(raw: Mapping[str, Any]) -> dict[str, Any]:
    inner = raw.get("deepspeed_config") or {}
    if not isinstance(inner, Mapping):
        return {"deepspeed_config": inner}
    mixed, clipping, steps = (
        raw.get("mixed_precision"),
        inner.get("gradient_clipping"),
        inner.get("gradient_accumulation_steps"),
    )
    named = inner.get("deepspeed_config_file") is not None
    beside = [name for name in _REFUSED_BESIDE if named and (name in inner or raw.get(name) is not None)]
    offload = (
        "param"
        if inner.get("offload_param_device") in ("cpu", "nvme")
        else "optimizer"
        if inner.get("offload_optimizer_device") in ("cpu", "nvme")
        else None
    )
    return {
        "accumulation": None if steps == "auto" else _whole(steps),
        "precision": {"no": "fp32", "false": "fp32", "fp16": "fp16", "bf16": "bf16", "fp8": "bf16"}.get(
            str(mixed).lower()
        ),
        "gradient_clipping": None if clipping == "auto" else clipping,
        "zero_stage": _whole(inner.get("zero_stage")),
        "offload": offload,
        "config_file": inner.get("deepspeed_config_file"),
        "beside_config_file": tuple(beside),
        "processes": raw.get("num_processes"),
        "mixed_precision": None if mixed is None else "no" if mixed is False else str(mixed).lower(),
        "optimizer_device": inner.get("offload_optimizer_device"),
        "param_device": inner.get("offload_param_device"),
        "optimizer_nvme_path": inner.get("offload_optimizer_nvme_path"),
        "param_nvme_path": inner.get("offload_param_nvme_path"),
        "gather_16bit": inner.get("zero3_save_16bit_model"),
    }


def _whole(value: Any) -> Any:
    """The number of a text of digits: Accelerate hands these fields over as environment variables."""
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value


def _axolotl(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "micro_batch": raw.get("micro_batch_size"),
        "accumulation": raw.get("gradient_accumulation_steps"),
        "precision": _flags(raw),
        "recompute": _checkpointing(raw),
        "seq_len": raw.get("sequence_len"),
        "optimizer": _optimizer(raw.get("optimizer")),
        "gradient_clipping": raw.get("max_grad_norm"),
        **_training(raw),
        "optim": raw.get("optimizer"),
        "adam_beta1": raw.get("adam_beta1"),
        "adam_beta2": raw.get("adam_beta2"),
        "adam_epsilon": raw.get("adam_epsilon"),
        "lr_scheduler": raw.get("lr_scheduler"),
        "finds_batch": _true(raw.get("auto_find_batch_size")),
    }


def _true(value: Any) -> bool:
    return value is True or (isinstance(value, str) and value.lower() == "true")


def _flags(raw: Mapping[str, Any]) -> str | None:
    """The precision, or the value that is none. axolotl has auto and full, too."""
    for name in ("bf16", "fp16"):
        value = raw.get(name)
        if not isinstance(value, (bool, type(None))) and str(value).lower() not in (
            "true",
            "false",
            "auto",
            "full",
            "0",
            "1",
        ):
            return f"{name} {value!r}"
    if _true(raw.get("bf16")) or raw.get("bf16") in ("full", "auto") or _true(raw.get("bf16_full_eval")):
        return "bf16"
    if _true(raw.get("fp16")) or _true(raw.get("fp16_full_eval")):
        return "fp16"
    return "fp32" if raw.get("bf16") is False or raw.get("fp16") is False else None


def _checkpointing(raw: Mapping[str, Any]) -> str | None:
    value = raw.get("gradient_checkpointing")
    return None if value is None else "full" if value else "none"


def _optimizer(name: Any) -> str | None:
    """Our name for the trainer's: adamw_torch and adamw_torch_fused are adamw, adamw_bnb_8bit is adamw-8bit."""
    spec = optimizer_named(name) if isinstance(name, str) else None
    return spec.label if spec else None


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


_WHOLE = ("micro_batch", "accumulation", "seq_len", "processes", "max_steps")
_NUMBERS = (
    "gradient_clipping",
    "learning_rate",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "weight_decay",
    "warmup_steps",
    "warmup_ratio",
)
_TEXTS = (
    "optim",
    "lr_scheduler",
    "config_file",
    "optimizer_device",
    "param_device",
    "optimizer_nvme_path",
    "param_nvme_path",
)


_NAMES = {
    "micro_batch": "per_device_train_batch_size",
    "accumulation": "gradient_accumulation_steps",
    "seq_len": "max_seq_length",
    "processes": "num_processes",
    "gradient_clipping": "max_grad_norm",
    "lr_scheduler": "lr_scheduler_type",
    "config_file": "deepspeed",
}
_NAMES_OF: Mapping[Kind, Mapping[str, str]] = {
    "llama-factory": {"seq_len": "cutoff_len"},
    "axolotl": {
        "micro_batch": "micro_batch_size",
        "seq_len": "sequence_len",
        "optim": "optimizer",
        "lr_scheduler": "lr_scheduler",
    },
    "accelerate": {
        "gradient_clipping": "gradient_clipping",
        "config_file": "deepspeed_config_file",
        "optimizer_device": "offload_optimizer_device",
        "param_device": "offload_param_device",
        "optimizer_nvme_path": "offload_optimizer_nvme_path",
        "param_nvme_path": "offload_param_nvme_path",
    },
}
"""The fields as the files call them, where that is otherwise."""
_MIXED = ("no", "fp16", "bf16", "fp8")
"""Source: accelerate/utils/dataclasses.py, PrecisionType."""


def _checked(path: str, kind: Kind, values: dict[str, Any]) -> dict[str, Any]:
    called = {**_NAMES, **_NAMES_OF.get(kind, {})}
    if "deepspeed_config" in values:
        raise Problem(f"{path}: deepspeed_config is {values['deepspeed_config']!r}, but must be an object")
    for name in _WHOLE:
        value = values.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            said = called.get(name, name)
            raise Problem(f"{path}: {said} is {value!r}, but must be a whole number of at least 1")
    for name in _NUMBERS:
        if values.get(name) is not None:
            values[name] = _number(path, called.get(name, name), values[name])
    if values.get("warmup_steps") is not None:
        values["warmup_steps"] = int(values["warmup_steps"])
    for name in _TEXTS:
        value = values.get(name)
        if value is not None and not isinstance(value, str):
            raise Problem(f"{path}: {called.get(name, name)} is {value!r}, but must be a text")
    precision, mixed = values.get("precision"), values.get("mixed_precision")
    if precision is not None and " " in precision:
        name, _, value = precision.partition(" ")
        raise Problem(f"{path}: {name} is {value}, but must be true or false")
    if mixed is not None and mixed not in _MIXED:
        raise Problem(f"{path}: mixed_precision is {mixed}, but must be {', '.join(_MIXED[:-1])} or {_MIXED[-1]}")
    gather = values.get("gather_16bit")
    values["gather_16bit"] = None if gather is None else _true(gather)
    stage = values.get("zero_stage")
    if stage is not None and (isinstance(stage, bool) or stage not in (0, 1, 2, 3)):
        raise Problem(f"{path}: zero_stage is {stage!r}, but must be 0, 1, 2 or 3")
    return values


def _number(path: str, name: str, value: Any) -> int | float:
    """A number, or the text of one: YAML 1.1 takes 5e-5 for a text."""
    number = _float(value) if isinstance(value, str) else value
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number < float("inf"):
        raise Problem(f"{path}: {name} is {value!r}, but must be a number of at least 0")
    return number


def _float(value: Any) -> float | None:
    try:
        return float(value)
    except ValueError:
        return None
