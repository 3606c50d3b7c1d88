"""What the command line's options may be, and how their texts become values."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from dsplan.schemas.problem import Problem
from typer.core import TyperCommand

if TYPE_CHECKING:
    from dsplan.schemas.cluster import Cluster


class LintFormat(str, Enum):
    text = "text"
    json = "json"
    sarif = "sarif"
    github = "github"
    gitlab = "gitlab"
    junit = "junit"
    markdown = "markdown"


class EstimateFormat(str, Enum):
    text = "text"
    json = "json"
    markdown = "markdown"


class TextOrJson(str, Enum):
    text = "text"
    json = "json"


class ReaderName(str, Enum):
    auto = "auto"
    deepspeed = "deepspeed"
    trainer = "trainer"
    accelerate = "accelerate"


class EngineName(str, Enum):
    native = "native"
    deepspeed = "deepspeed"


class EngineChoice(str, Enum):
    native = "native"
    deepspeed = "deepspeed"
    both = "both"


class FailOn(str, Enum):
    error = "error"
    warning = "warning"


class RecomputeName(str, Enum):
    none = "none"
    full = "full"
    selective = "selective"


class OffloadName(str, Enum):
    none = "none"
    optimizer = "optimizer"
    param = "param"


class BuildName(str, Enum):
    host = "host"
    meta = "meta"


class QuantizeName(str, Enum):
    nf4 = "nf4"
    int8 = "int8"


class AttentionName(str, Enum):
    flash = "flash"
    sdpa = "sdpa"
    eager = "eager"


class Objective(str, Enum):
    throughput = "throughput"
    memory = "memory"


class Most(str, Enum):
    micro_batch = "micro-batch"
    seq_len = "seq-len"


class Fewest(str, Enum):
    gpus = "gpus"


MODEL_GROUP = "The model"
GPUS_GROUP = "The GPUs"
VARIED_GROUP = "What is estimated"
QUESTIONS_GROUP = "Questions"
REPORT_GROUP = "The report"
"""Headings of the help of estimate and tune."""
_HEADINGS = ("Arguments", VARIED_GROUP, GPUS_GROUP, MODEL_GROUP, QUESTIONS_GROUP, REPORT_GROUP, "Options")

ClusterOption = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        help="8xH100-80GB; 4x8xA100-80GB (nodes x GPUs x kind); 8 (of unknown kind); a .json file; local.",
        rich_help_panel=GPUS_GROUP,
    ),
]
WorldSizeOption = Annotated[
    int | None, typer.Option("--world-size", min=1, help="Short for --cluster N.", rich_help_panel=GPUS_GROUP)
]
ArgsOption = Annotated[
    str | None,
    typer.Option(
        "--args",
        help="HF TrainingArguments, Accelerate, axolotl or LLaMA-Factory file that fills values in.",
        rich_help_panel=VARIED_GROUP,
    ),
]
ReserveOption = Annotated[
    str | None,
    typer.Option(
        "--reserve", help="Of each GPU, left to a neighbour: 2GiB, 500MB.", metavar="BYTES", rich_help_panel=GPUS_GROUP
    ),
]
ExpandableOption = Annotated[
    bool,
    typer.Option(
        "--expandable-segments",
        help="The run sets PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
        rich_help_panel=GPUS_GROUP,
    ),
]
TraceTimeoutOption = Annotated[
    float | None,
    typer.Option(
        "--trace-timeout",
        help="Seconds that a training script has to come to its first backward (600).",
        metavar="SECONDS",
        min=1,
        rich_help_panel=MODEL_GROUP,
    ),
]
DefineOption = Annotated[
    list[str] | None,
    typer.Option("--define", help="NAME=VALUE for a placeholder of a template; repeat it.", metavar="NAME=VALUE"),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="name=value for build_model(); repeat it.", metavar="NAME=VALUE", rich_help_panel=MODEL_GROUP
    ),
]


LoraOption = Annotated[
    str | None,
    typer.Option(
        "--lora",
        help="Adapters as PEFT's: r=16,targets=all-linear; or targets=q_proj,v_proj; also alpha, dropout, modules_to_save.",
        metavar="KEY=VALUE,...",
        rich_help_panel=MODEL_GROUP,
    ),
]
QuantizeOption = Annotated[
    QuantizeName | None,
    typer.Option(
        "--quantize",
        help="Linear layers as bitsandbytes': nf4 (QLoRA, double quantisation) or int8.",
        rich_help_panel=MODEL_GROUP,
    ),
]
FreezeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--freeze",
        help="Parameters or modules that are not trained: 'model.layers.*'; repeat it.",
        metavar="GLOB",
        rich_help_panel=MODEL_GROUP,
    ),
]
LossOption = Annotated[
    str | None,
    typer.Option(
        "--loss",
        help="plain: the model's own; fused: with the output layer, as Liger's; chunked:N: the logits in N parts.",
        metavar="plain|fused|chunked:N",
        rich_help_panel=MODEL_GROUP,
    ),
]
AttentionOption = Annotated[
    AttentionName | None,
    typer.Option("--attention", help="Attention of a Hugging Face model.", rich_help_panel=MODEL_GROUP),
]
PackedOption = Annotated[
    bool,
    typer.Option(
        "--packed",
        help="Sequences without padding in one row: micro_batch of seq_len each, by flash attention.",
        rich_help_panel=MODEL_GROUP,
    ),
]


class GroupedCommand(TyperCommand):
    """A command whose help lists its options under the headings that they name."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[Any]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                heading = getattr(param, "rich_help_panel", None) or "Options"
                groups.setdefault("Arguments" if param.param_type_name == "argument" else heading, []).append(record)
        for heading, records in sorted(groups.items(), key=lambda group: _HEADINGS.index(group[0])):
            with formatter.section(heading):
                formatter.write_dl(records)


class LintCommand(TyperCommand):
    """lint, whose --write-baseline may stand without its FILE."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, list(with_baseline_file(args)))


def with_baseline_file(words: Sequence[str]) -> Iterator[str]:
    """The words, where --write-baseline has a value: what follows it, unless that is an option or a file to lint."""
    for word, following in zip(words, [*words[1:], None], strict=True):
        if word == "--write-baseline" and (following is None or following.startswith("-") or _to_lint(following)):
            yield "--write-baseline="
        else:
            yield word


def _to_lint(path: str) -> bool:
    from dsplan.planner.auditing.baseline import holds_one

    return os.path.exists(path) and not holds_one(path)


def value_of(choice: Enum | None) -> str | None:
    """The text of an option with choices; None where it is not given."""
    return None if choice is None else str(choice.value)


def cluster_of(cluster: str | None, world_size: int | None) -> Cluster | None:
    """Of --cluster or --world-size; None where neither is given."""
    if cluster is not None and world_size is not None:
        raise Problem("--cluster and --world-size say the same; give one of them")
    if cluster is None and world_size is None:
        return None
    if cluster is not None and cluster.strip() == "local":
        return this_machine()
    from dsplan.schemas.cluster import parse_cluster

    return parse_cluster(cluster if cluster is not None else str(world_size))


def this_machine() -> Cluster:
    """The GPUs seen here."""
    from dsplan.planner.machine import local_cluster

    return local_cluster()


def reserve_of(text: str | None) -> int:
    """Bytes of --reserve."""
    if text is None:
        return 0
    from dsplan.schemas.units import parse_bytes

    try:
        return parse_bytes(text)
    except ValueError as error:
        raise Problem(f"--reserve {error}") from error


def timeout_of(seconds: float | None) -> float:
    """Of --trace-timeout."""
    from dsplan.planner.models.load import TRACE_TIMEOUT_SECONDS

    return TRACE_TIMEOUT_SECONDS if seconds is None else seconds


def ids_of(text: str | None) -> tuple[str, ...]:
    """Of a list by comma."""
    return tuple(part.strip() for part in text.split(",") if part.strip()) if text else ()


def sets_of(pairs: list[str] | None) -> dict[str, str]:
    """Of --set name=value, each name once."""
    sets: dict[str, str] = {}
    for pair in pairs or ():
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise Problem(f"--set {pair} cannot be read; write --set name=value")
        if name in sets:
            raise Problem(f"--set {name} is given twice ({sets[name]} and {value}); keep one")
        sets[name] = value
    return sets


def defines_of(pairs: list[str] | None) -> dict[str, str]:
    """Of --define NAME=VALUE, each name once."""
    defines: dict[str, str] = {}
    for pair in pairs or ():
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise Problem(f"--define {pair} cannot be read; write --define NAME=VALUE")
        if defines.setdefault(name.strip(), value) != value:
            raise Problem(f"--define {name} is given twice ({defines[name.strip()]} and {value}); keep one")
    return defines
