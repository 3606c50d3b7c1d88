"""A row of a table of published runs -> the run as a plan of ours, or the reason why it has none."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from dsplan.schemas.choices import OptimizerSpec, ZeroKnobs
from dsplan.schemas.cluster import Cluster
from dsplan.schemas.layout import Layout
from dsplan.schemas.plan import Engine, Plan

from .architectures import Architecture, architecture_of
from .cells import COLUMNS, NO, Kind, Unmapped, gpu_of, memory_of, number, whole
from .frameworks import Framework, framework_of
from .networks import Network, Style

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


_BEYOND = (
    (r"\bpadding_free(?<!without padding_free)", "padding-free batches: their lengths are not published"),
    (r"vision tower|multimodal|freeze_vit", "a vision tower beside the language model"),
    (r"partition_activations|cpu_checkpointing", "checkpoints split over ranks or on the host"),
)


def run_of(row: Mapping[str, str]) -> Run:
    """Unmapped, with a reason that groups, where the row has no plan."""
    row = dict.fromkeys(COLUMNS, "") | {name: value or "" for name, value in row.items()}
    if row["row_id"] in INCONSISTENT:
        raise Unmapped(f"excluded: {INCONSISTENT[row['row_id']]}")
    if not row["kind"].lower().startswith("measured"):
        raise Unmapped(f"not measured: {row['kind'].split(' (')[0] or 'kind is not said'}")
    measured, kind, fits = memory_of(row)
    framework = framework_of(row)
    notes: list[str] = []
    for pattern, reason in _BEYOND:
        if re.search(pattern, f"{row['notes']} {row['offload']} {row['method']}", re.IGNORECASE):
            raise Unmapped(reason)
    precision = _precision(row)
    gpu = gpu_of(row)
    layout, ranks = _layout(row)
    micro_batch, accumulation = _batch(row, layout.dp)
    zero_stage = _zero_stage(row)
    lora_rank, lora_targets, trained_layers = _method(row)
    architecture = architecture_of(row)
    if isinstance(architecture, str):
        raise Unmapped(architecture)
    if row["mem_scope"].startswith(("pipeline stage", "rank 0 @")):
        raise Unmapped("memory of one phase or pipeline stage")
    recompute = _recompute(row, framework)
    if recompute == "selective" and not framework.selective:
        raise Unmapped("selective recompute is not described")
    adapted = bool(lora_rank) or trained_layers is not None
    plain = not layout.ranks > 1 and "deepspeed" not in row["framework"].lower()
    if plain and not adapted:
        raise Unmapped("one GPU without an engine: weights and states in one dtype are not modelled")
    style: Style = framework.style
    eager = row["attn"].startswith("eager") or (style == "megatron" and "flash" not in row["attn"])
    # adapters without shards: the frozen weights stay in 16 bits, without the fp32 copy that engine native makes of a model
    engine: Engine = "deepspeed" if lora_rank and zero_stage == 0 else framework.engine
    compiled = row["compile"].lower() not in NO or "cumulative" in row["notes"]
    chunked: Literal["no", "eager", "compiled"] = "no"
    if framework.chunked_loss:
        chunked = "compiled" if compiled else "eager"
    network = Network(
        architecture=architecture,
        style=style,
        attention="eager" if eager else "sdpa",
        dropout=0.1 if style == "megatron" else 0.0,
        positions=number(row, "seq")
        if not architecture.gated and (style != "hf" or architecture.family != "llama")
        else 0,
        fused_loss=bool(re.search(r"(?<!no )(?<!without )\b(liger|cut cross entropy)", row["notes"], re.IGNORECASE)),
        shifted_loss=framework.shifted_loss,
        selective=recompute == "selective",
        chunked_loss=chunked,
        checkpointed=chunked != "no" and recompute == "full",
        lora_rank=lora_rank,
        lora_targets=lora_targets,
        trained_layers=trained_layers,
    )
    if compiled:
        notes.append("compiled; predicted as eager")
    if gpu is None:
        notes.append(f"GPU is not known: {row['gpu_type'] or 'not said'}")
    plan = Plan(
        engine=engine,
        layout=layout,
        zero_stage=zero_stage,
        precision=precision,
        micro_batch=micro_batch,
        accumulation=accumulation,
        seq_len=number(row, "seq"),
        recompute="none" if recompute == "selective" or network.checkpointed else recompute,
        offload=_offload(row),
        optimizer=_optimizer(row, framework),
        knobs=_knobs(row, architecture),
        sequence_parallel=_sequence_parallel(row, framework, layout),
        built="meta" if engine == "native" or _zero_init(row) else "host",
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
        kind=kind or framework.peak_kind,
        fits=fits if gpu else None,
        expandable=framework.expandable or "expandable_segments" in row["notes"],
        notes=tuple(notes),
    )


def _batch(row: Mapping[str, str], dp: int) -> tuple[int, int]:
    """(micro_batch, accumulation): where one of them is not said, what the global batch leaves for it."""
    micro_batch, accumulation, batch = (whole(row[name]) for name in ("micro_batch", "grad_accum", "global_batch"))
    if row["micro_batch"] and micro_batch is None:
        raise Unmapped("micro_batch is not one number")
    if micro_batch and not row["grad_accum"] and batch and batch % (micro_batch * dp) == 0:
        accumulation = batch // (micro_batch * dp)
    if not micro_batch and batch and accumulation and batch % (accumulation * dp) == 0:
        micro_batch = batch // (accumulation * dp)
    if not micro_batch:
        raise Unmapped("micro_batch is not said")
    return micro_batch, accumulation or 1


_QUANTIZED = re.compile(r"\b(awq|gptq|aqlm|hqq|gguf|bnb|int4|int8|[48]-?bit)\b|/qlora/")
"""In a model's name, or in the place of its script."""


def _precision(row: Mapping[str, str]) -> str:
    text = row["precision"].lower()
    if re.search(r"fp8|float8|mxfp|nvfp", text):
        raise Unmapped("8-bit floats")
    if re.search(r"nf4|4bit|4-bit|int4|int8|8bit", text) or _QUANTIZED.search(
        f"{row['model']} {row['source']}".lower()
    ):
        raise Unmapped("quantised weights")
    beside = f"{row['optimizer']} {row['framework']} {row['notes']}".lower()
    for said in (text, beside):
        for name, pattern in (("bf16", r"bf16|bfloat ?16"), ("fp16", r"fp16|float16|\bhalf\b|^16-(mixed|true)")):
            if re.search(pattern, said):
                return name
    if re.search(r"fp32|float32|tf32|\bsingle\b|^32", text):
        return "fp32"
    raise Unmapped("precision is not said")


def _layout(row: Mapping[str, str]) -> tuple[Layout, int]:
    ranks = number(row, "gpus", 1)
    tp, pp, cp, ep = (number(row, name, 1) for name in ("tp", "pp", "cp", "ep"))
    sp = whole(row["sp"]) or 1
    if cp > 1 or ep > 1:
        raise Unmapped("context or expert parallel")
    if "device_map" in row["sharding"]:
        raise Unmapped("layers spread over GPUs without data parallel")
    if ranks % (tp * pp * sp):
        raise Unmapped("tp x pp x sp does not divide the GPUs")
    return Layout(dp_shard=ranks // (tp * pp * sp), tp=tp, pp=pp, sp=sp), ranks


def _sequence_parallel(row: Mapping[str, str], framework: Framework, layout: Layout) -> bool:
    """Megatron's: "true", or "reduce-scatter", in the column whose numbers are degrees of Ulysses'."""
    said = re.search(r"true|yes|on\b|reduce.?scatter|megatron", row["sp"].lower()) is not None
    return layout.tp > 1 and (said or framework.sequence_parallel)


def _zero_stage(row: Mapping[str, str]) -> int:
    said = re.search(r"(?<!\d)([0-3])(\.0)?$", row["zero_stage"])
    text = f"{row['sharding']} {row['framework']}".lower()
    if not said:
        said = re.search(r"zero[-_ ]?(?:stage[-_ ]?)?([0-3])\b", text)
    if said:
        return int(said[1])
    for pattern, zero_stage in ((r"no_shard|\bddp\b", 0), (r"shard_grad_op", 2), (r"fsdp|full_shard", 3)):
        if re.search(pattern, text):
            return zero_stage
    if number(row, "gpus", 1) == 1:
        return 0
    raise Unmapped("ZeRO stage is not said")


_QWEN = re.compile("QwenLM/Qwen")
"""Its scripts put adapters of rank 64 on every linear layer of a block. Source: QwenLM/Qwen, finetune.py, LoraArguments."""
_WHOLE = set(
    [
        "full",
        "fft",
        "ft",
        "sft",
        "pretrain",
        "pretraining",
        "pre",
        "train",
        "training",
        "finetune",
        "finetuning",
        "fine",
        "tune",
        "tuning",
        "continued",
        "parameter",
        "parameters",
        "param",
        "params",
        "weights",
        "model",
        "instruction",
        "pure",
        "bf16",
    ]
)
"""Words of which a description of training everything consists."""


def _method(row: Mapping[str, str]) -> tuple[int, Literal["attention", "all"], int | None]:
    """(rank of the adapters, what they sit on, how many blocks are trained)."""
    text = row["method"].lower()
    if re.search(r"rlhf|\b(dpo|gkd|kto|ppo|grpo|orpo|simpo|rm)\b|reward", text):
        raise Unmapped("a second model beside the trained one")
    if re.search("qlora|q4|bit", text):
        raise Unmapped("quantised weights")
    frozen = re.search(r"freeze \(layers (\d+)-(\d+) trainable", text)
    if frozen:
        return 0, "attention", int(frozen[2]) - int(frozen[1]) + 1
    if re.fullmatch(r"(sft )?lora\b.*", text) and not re.search(r"\+|llm", text):
        rank = re.search(r"r(?:ank)?=(\d+)", text + row["notes"])
        every = re.search("all|swift", text + row["framework"]) and "default" not in text
        if not rank and _QWEN.search(row["source"]):
            return 64, "all", None
        return int(rank[1]) if rank else 8, "all" if every else "attention", None
    if set(re.findall(r"[a-z0-9]+", text)) <= _WHOLE:
        return 0, "attention", None
    raise Unmapped(f"way of training: {row['method']}")


def _recompute(row: Mapping[str, str], framework: Framework) -> Literal["none", "full", "selective"]:
    text = row["act_ckpt"].lower()
    if text in ("", "unstated"):
        return framework.recompute
    if re.match(r"full|true|yes|on\b|uniform|gradient.?checkpointing|1$", text):
        return "full"
    if text in NO or re.match(r"none|no\b|false|off", text):
        return "none"
    if text.startswith("selective"):
        return "selective"
    raise Unmapped("recompute of parts of a block")


def _offload(row: Mapping[str, str]) -> Literal["none", "optimizer", "param"]:
    text = row["offload"].lower()
    if text in NO or text.startswith("none;"):
        return "none"
    if "activation" in text or "ao " in text:
        raise Unmapped("offload of activations or of gradients")
    if "param" in text or "cpu offload" in text:
        return "param"
    if re.search("cpu|nvme|optimizer|zero-?offload", text):
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
    return _zero_stage(row) == 3 and bool(_AUTO.search(row["framework"]) or LEAKY_LINEAR.search(row.get("source", "")))


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
    if _zero_stage(row) == 3 and _AUTO.search(row["framework"]):
        square = architecture.hidden**2
        auto = {
            "reduce_bucket_size": square,
            "prefetch_bucket_size": int(0.9 * square),
            "param_persistence_threshold": 10 * architecture.hidden,
        }
        said = auto | said
    if _zero_stage(row) == 3:
        said["memory_efficient_linear"] = _efficient_linear(row)
    return ZeroKnobs(**said)  # type: ignore[arg-type]
