"""A row of a table of published runs -> the run as a plan of ours, or the reason why it has none."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from dsplan.schemas.choices import OptimizerSpec, ZeroKnobs
from dsplan.schemas.cluster import USABLE_SHARE, Cluster, Gpu, aliases, gpus
from dsplan.schemas.layout import Layout
from dsplan.schemas.plan import Engine, Plan
from dsplan.schemas.units import GB, GIB

from .architectures import Architecture, architecture_of
from .networks import Network, Style

Kind = Literal["allocated", "reserved", "device"]

INCONSISTENT = {f"bigscience_a100_bloom_tuning-{number:03}": "inconsistent by a factor of 4" for number in (52, 53, 54)}
"""Rows that the tables' own notes call wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One published run. measured_bytes: of one GPU, of that kind; None where only fits or oom is known."""

    row_id: str
    framework: str
    gpu: str
    group: str
    """"full, zero 2-3", "full, zero 0-1", "adapters" or "part frozen"."""
    network: Network
    plan: Plan
    cluster: Cluster
    measured_bytes: float | None
    kind: Kind
    fits: bool | None
    expandable: bool
    notes: tuple[str, ...]


class Unmapped(Exception):
    """A row that no plan of ours stands for; its text is the reason."""


@dataclass(frozen=True, slots=True)
class Framework:
    """How a family of frameworks runs a model: the engine that stands for it, its kernels, its optimizer."""

    pattern: str
    engine: Engine
    style: Style
    kernel: Literal["fused", "foreach", "for-loop"]
    source: str
    recompute: Literal["none", "full"] = "none"
    """Where a row does not say."""
    expandable: bool = False
    """Its scripts ask the allocator for expandable segments."""
    shifted_loss: bool = False
    """The tables' runs are of 2023 and 2024, with the loss that Hugging Face's models had then."""


FRAMEWORKS = (
    Framework("megatron.*deepspeed", "deepspeed", "megatron", "fused", "apex FusedAdam"),
    Framework(
        "ms-swift.*deepspeed",
        "deepspeed",
        "hf",
        "foreach",
        "its examples export expandable_segments:True",
        expandable=True,
    ),
    Framework("hf trainer.*deepspeed", "deepspeed", "hf", "foreach", "transformers: torch AdamW", shifted_loss=True),
    Framework("deepspeed", "deepspeed", "hf", "fused", "deepspeed/runtime/engine.py: FusedAdam", shifted_loss=True),
    Framework("torchtitan", "native", "fused", "fused", "torchtitan/components/optimizer.py"),
    Framework("llm-foundry", "native", "fused", "foreach", "torch AdamW by default"),
    Framework("fsdp", "native", "hf", "foreach", "torch AdamW by default"),
    Framework("axolotl", "native", "hf", "foreach", "torch AdamW by default"),
    Framework("torchtune", "native", "fused", "foreach", "its recipes checkpoint by default", recompute="full"),
    Framework("litgpt|pytorch|peft|ddp", "deepspeed", "hf", "foreach", "torch AdamW by default"),
    Framework("hf trainer|hf$", "deepspeed", "hf", "foreach", "torch AdamW by default", shifted_loss=True),
)
OWN_ENGINES = ("megatron", "flagscale", "nanotron", "internevo", "paddle", "unsloth", "mist", "nemo")
"""Frameworks whose sharding and buffers are neither DeepSpeed's nor FSDP2's."""


_BEYOND = (
    (r"\bpadding_free(?<!without padding_free)", "padding-free batches: their lengths are not published"),
    (r"vision tower|multimodal|freeze_vit", "a vision tower beside the language model"),
    (r"partition_activations|cpu_checkpointing", "checkpoints split over ranks or on the host"),
)


def run_of(row: Mapping[str, str]) -> Run:
    """Unmapped, with a reason that groups, where the row has no plan."""
    if row["row_id"] in INCONSISTENT:
        raise Unmapped(f"excluded: {INCONSISTENT[row['row_id']]}")
    if not row["kind"].startswith("measured"):
        raise Unmapped(f"not measured: {row['kind'].split(' (')[0]}")
    measured, kind, fits = _memory(row)
    notes: list[str] = []
    framework = _framework(row)
    for pattern, reason in _BEYOND:
        if re.search(pattern, f"{row['notes']} {row['offload']} {row['method']}", re.IGNORECASE):
            raise Unmapped(reason)
    precision = _precision(row)
    gpu = gpu_of(row)
    layout, ranks = _layout(row)
    zero_stage = _zero_stage(row)
    lora_rank, lora_targets, trained_layers = _method(row)
    architecture = architecture_of(row)
    if isinstance(architecture, str):
        raise Unmapped(architecture)
    if row["mem_scope"].startswith(("pipeline stage", "rank 0 @")):
        raise Unmapped("memory of one phase or pipeline stage")
    recompute = _recompute(row, framework)
    if recompute == "selective" and framework.pattern != "torchtitan":
        raise Unmapped("selective recompute is not described")
    adapted = bool(lora_rank) or trained_layers is not None
    plain = not layout.ranks > 1 and "deepspeed" not in row["framework"].lower()
    if plain and not adapted:
        raise Unmapped("one GPU without an engine: weights and states in one dtype are not modelled")
    style: Style = framework.style
    eager = row["attn"].startswith("eager") or (style == "megatron" and "flash" not in row["attn"])
    network = Network(
        architecture=architecture,
        style=style,
        attention="eager" if eager else "sdpa",
        dropout=0.1 if style == "megatron" else 0.0,
        positions=_number(row, "seq") if not architecture.gated and style != "hf" else 0,
        fused_loss=bool(re.search(r"(?<!no )(?<!without )\b(liger|cut cross entropy)", row["notes"], re.IGNORECASE)),
        shifted_loss=framework.shifted_loss,
        selective=recompute == "selective" and framework.pattern == "torchtitan",
        lora_rank=lora_rank,
        lora_targets=lora_targets,
        trained_layers=trained_layers,
    )
    if row["compile"] not in ("", "no", "none", "false"):
        notes.append("compiled; predicted as eager")
    plan = Plan(
        engine=framework.engine,
        layout=layout,
        zero_stage=zero_stage,
        precision=precision,
        micro_batch=_number(row, "micro_batch"),
        accumulation=_number(row, "grad_accum", 1),
        seq_len=_number(row, "seq"),
        recompute="none" if recompute == "selective" else recompute,
        offload=_offload(row),
        optimizer=_optimizer(row, framework),
        knobs=_knobs(row, architecture),
        built="meta" if framework.engine == "native" or _zero_init(row) else "host",
    )
    sharded = zero_stage >= 2
    group = "adapters" if lora_rank else "part frozen" if adapted else f"full, zero {'2-3' if sharded else '0-1'}"
    per_node = min(ranks, 8)
    return Run(
        row_id=row["row_id"],
        framework=row["framework"],
        gpu=gpu.name if gpu else "unknown",
        group=group,
        network=network,
        plan=plan,
        cluster=Cluster(nodes=-(-ranks // per_node), gpus_per_node=per_node, gpu=gpu, text=row["gpu_type"]),
        measured_bytes=measured,
        kind=kind,
        fits=fits if gpu else None,
        expandable=framework.expandable or "expandable_segments" in row["notes"],
        notes=tuple(notes),
    )


def gpu_of(row: Mapping[str, str]) -> Gpu | None:
    """The GPU of gpu_type, told by its model and its memory."""
    text = (
        re.sub(r"\s*\(.*", "", row["gpu_type"])
        .replace("NVIDIA ", "")
        .replace("AMD ", "")
        .replace("_", "-")
        .replace(" ", "-")
    )
    memory = row["gpu_mem_gb"].strip()
    model = re.match(r"[A-Za-z]+-?\d+[A-Za-z]*", text.replace("RTX-", "RTX"))
    joined = re.sub(r"-\d+GB$", "", text).replace("RTX-", "RTX").replace("Titan-", "Titan").replace("-Ada", "Ada")
    candidates = [text, text.replace("RTX-", "RTX"), joined]
    if model:
        candidates += [f"{model[0]}-{memory}GB", model[0]]
    for candidate in candidates:
        name = aliases().get(candidate.lower())
        if name:
            return _of_size(gpus()[name], memory)
    return None


def _of_size(gpu: Gpu, memory: str) -> Gpu:
    """The card with the memory that the row names, where that is another."""
    size = float(memory) * GB if re.fullmatch(r"\d+(\.\d+)?", memory) else gpu.memory_bytes
    if abs(size / gpu.memory_bytes - 1) < 0.03:
        return gpu
    return replace(gpu, name=f"{gpu.name.split('-')[0]}-{memory}GB", usable_bytes=round(USABLE_SHARE * size))


def _memory(row: Mapping[str, str]) -> tuple[float | None, Kind, bool | None]:
    outcome = row["outcome"].lower()
    if outcome.startswith("init"):
        raise Unmapped("memory of the start, not of a step")
    if not row["mem_value"]:
        if outcome.startswith("oom"):
            return None, "device", False
        if "fits in HBM" in row["notes"]:
            return None, "device", True
        raise Unmapped("no memory and no label of fit")
    unit = row["mem_unit"]
    if unit.startswith(("GiB", "G (", "MiB")) or unit == "G" or "GiB" in unit or "2^30" in unit:
        scale = GIB / 1024 if unit.startswith("MiB") else GIB
    elif unit.startswith(("GB", "MB")):
        scale = 1e6 if unit.startswith("MB") else 1e9
    else:
        raise Unmapped("no unit of memory")
    said = row["mem_kind"].lower()
    device = re.search(r"nvidia-smi|gpu memory used|vram|process|gpu total", said)
    if device and scale == 1e9:  # nvidia-smi counts MiB
        scale = GIB
    value = float(row["mem_value"]) * scale
    shared = re.search(r"sum over (\d+)", row["mem_scope"])
    if shared:
        value /= int(shared[1])
    if device:
        kind: Kind = "device"
    elif re.search(r"allocated|active|tracemalloc|memory_summary", said) and "reserved" not in said:
        kind = "allocated"
    else:
        kind = "reserved"
    return value, kind, True


def _framework(row: Mapping[str, str]) -> Framework:
    name = row["framework"].lower()
    for framework in FRAMEWORKS:
        if re.search(framework.pattern, name):
            if framework.style != "megatron" and any(own in name for own in OWN_ENGINES):
                break
            return framework
    if any(own in name for own in OWN_ENGINES):
        raise Unmapped("an engine of its own: " + next(own for own in OWN_ENGINES if own in name))
    raise Unmapped(f"framework is not known: {row['framework'] or 'not said'}")


def _precision(row: Mapping[str, str]) -> str:
    text = row["precision"].lower()
    if re.search(r"fp8|float8|mxfp|nvfp", text):
        raise Unmapped("8-bit floats")
    if re.search(r"nf4|4bit|4-bit|int4|int8|8bit", text):
        raise Unmapped("quantised weights")
    if re.search(r"bf16|bfloat16", text):
        return "bf16"
    if "fp16" in text:
        return "fp16"
    if "fp32" in text:
        return "fp32"
    if "fp16" in row["optimizer"] or "fp16" in row["notes"]:
        return "fp16"
    raise Unmapped("precision is not said")


def _layout(row: Mapping[str, str]) -> tuple[Layout, int]:
    ranks = _number(row, "gpus", 1)
    tp, pp, cp, ep = (_number(row, name, 1) for name in ("tp", "pp", "cp", "ep"))
    if cp > 1 or ep > 1:
        raise Unmapped("context or expert parallel")
    if "device_map" in row["sharding"]:
        raise Unmapped("layers spread over GPUs without data parallel")
    if ranks % (tp * pp):
        raise Unmapped("tp x pp does not divide the GPUs")
    return Layout(dp_shard=ranks // (tp * pp), tp=tp, pp=pp), ranks


def _zero_stage(row: Mapping[str, str]) -> int:
    if row["zero_stage"] in ("0", "1", "2", "3"):
        return int(row["zero_stage"])
    if re.search("fsdp", (row["sharding"] + row["framework"]).lower()):
        return 3
    if not row["zero_stage"] and _number(row, "gpus", 1) == 1:
        return 0
    raise Unmapped("ZeRO stage is not said")


def _method(row: Mapping[str, str]) -> tuple[int, Literal["attention", "all"], int | None]:
    """(rank of the adapters, what they sit on, how many blocks are trained)."""
    text = row["method"].lower()
    if re.search("rlhf|dpo|gkd|kto", text):
        raise Unmapped("a second model beside the trained one")
    if re.search("qlora|q4|bit", text):
        raise Unmapped("quantised weights")
    frozen = re.search(r"freeze \(layers (\d+)-(\d+) trainable", text)
    if frozen:
        return 0, "attention", int(frozen[2]) - int(frozen[1]) + 1
    if re.fullmatch(r"(sft )?lora\b.*", text) and not re.search(r"\+|llm", text):
        rank = re.search(r"r(?:ank)?=(\d+)", text + row["notes"])
        every = re.search("all|swift", text + row["framework"]) and "default" not in text
        return int(rank[1]) if rank else 8, "all" if every else "attention", None
    if re.fullmatch(r"(sft |continued )?(full|pretrain|full pretrain|full finetune|sft|)( \(pure bf16\))?", text):
        return 0, "attention", None
    raise Unmapped(f"way of training: {row['method']}")


def _recompute(row: Mapping[str, str], framework: Framework) -> Literal["none", "full", "selective"]:
    text = row["act_ckpt"].lower()
    if text.startswith("full"):
        return "full"
    if text in ("", "unstated"):
        return framework.recompute
    if text == "false" or text.startswith("none"):
        return "none"
    if text.startswith("selective"):
        return "selective"
    raise Unmapped("recompute of parts of a block")


def _offload(row: Mapping[str, str]) -> Literal["none", "optimizer", "param"]:
    text = row["offload"].lower()
    if text in ("", "none") or text.startswith("none;"):
        return "none"
    if "activation" in text or "ao " in text:
        raise Unmapped("offload of activations or of gradients")
    if "param" in text or "cpu offload" in text:
        return "param"
    if "cpu" in text or "optimizer" in text:
        return "param" if "zero-3" in text else "optimizer"
    raise Unmapped("offload is not said clearly")


def _optimizer(row: Mapping[str, str], framework: Framework) -> OptimizerSpec:
    text = row["optimizer"].lower()
    if re.search("8.?bit|4.?bit|fp8|galore|adafactor|muon|bf16 master|lpmm", text):
        raise Unmapped("optimizer with other than fp32 states")
    name = "sgd" if "sgd" in text else "lion" if text == "lion" else "adamw"
    kernel = "fused" if "fused" in text else framework.kernel
    return OptimizerSpec(name=name, kernel=kernel)


LEAKY_LINEAR = re.compile("FlagPerf")
"""Sources whose scripts make the model under zero.Init(mem_efficient_linear=False).

Source: FlagOpen/FlagPerf, training/benchmarks/{llama2_7b,chatglm3_6b}/deepspeed/run_pretraining.py.
"""


def _zero_init(row: Mapping[str, str]) -> bool:
    """Whether the model is made shard by shard: HF Trainer does so at stage 3, and FlagPerf's scripts."""
    return row["zero_stage"] == "3" and bool(
        _AUTO.search(row["framework"]) or LEAKY_LINEAR.search(row.get("source", ""))
    )


def _efficient_linear(row: Mapping[str, str]) -> bool:
    """Whether linear layers save the parameter, not a view of it: under zero.Init alone, up to release 0.19.3.

    Source: deepspeed/runtime/zero/partition_parameters.py. All tables are of earlier releases.
    """
    return _zero_init(row) and not LEAKY_LINEAR.search(row.get("source", ""))


_AUTO = re.compile("ms-swift|hf trainer|accelerate", re.IGNORECASE)


def _knobs(row: Mapping[str, str], architecture: Architecture) -> ZeroKnobs:
    """Sizes that the notes give; under HF Trainer at stage 3 those that it fills "auto" with; else DeepSpeed's defaults.

    Source: transformers, integrations/deepspeed.py, trainer_config_finalize.
    """
    said: dict[str, int] = {}
    names = (
        ("prefetch", "prefetch_bucket_size"),
        ("live(?:/reuse)?", "max_live_parameters"),
        ("reduce bucket", "reduce_bucket_size"),
        ("buckets", "reduce_bucket_size"),
        ("allgather bucket", "allgather_bucket_size"),
    )
    for pattern, name in names:
        match = re.search(rf"\b{pattern} (\d+(?:\.\d+)?(?:e\d+)?)\b", row["notes"])
        if match:
            said[name] = int(float(match[1]))
    if row["zero_stage"] == "3" and _AUTO.search(row["framework"]):
        square = architecture.hidden**2
        auto = {
            "reduce_bucket_size": square,
            "prefetch_bucket_size": int(0.9 * square),
            "param_persistence_threshold": 10 * architecture.hidden,
        }
        said = auto | said
    if row["zero_stage"] == "3":
        said["memory_efficient_linear"] = _efficient_linear(row)
    return ZeroKnobs(**said)  # type: ignore[arg-type]


def _number(row: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = row[name].strip()
    if re.fullmatch(r"\d+(\.0)?", text):
        return int(float(text))
    if not text and default is not None:
        return default
    raise Unmapped(f"{name} is not said" if not text else f"{name} is not one number")
